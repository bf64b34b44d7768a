"""Environments with rlpack installed as users install it, and folders whose files have unfortunate names."""

import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What users may well have where they run commands, and what our checkout, the standard library or a package has too.
OF_USERS = (
    "workers/__init__.py", "recipes/__init__.py", "configs/__init__.py", "random.py", "types.py", "datasets.py",
)  # fmt: skip


def build(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """Build a distribution of `source` as pip does, and return its file."""
    code = f"import sys, hatchling.build as b; print(b.build_{kind}(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True, check=True, timeout=120
    )
    return folder / built.stdout.split()[-1]


def built_by_pip(folder: Path) -> Path:
    """Return the wheel that `pip wheel .` writes into `folder`."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def pip(*words: str) -> None:
    """Run pip without an index."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *words, "--no-index"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)


def environment_with(kind: str, folder: Path) -> Path:
    """Return the interpreter of a new environment with a `wheel` or `editable` rlpack, and our own dependencies."""
    pytest.importorskip("hatchling")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder without reading the .pth files in it, such as the checkout's own.
    dependencies = [path for path in map(Path, sys.path) if "site-packages" in path.parts]
    dependencies += [Path(path) for path in site.getsitepackages()]
    (packages / "dependencies.pth").write_text("\n".join(map(str, dict.fromkeys(dependencies))))
    what = ["--editable", str(ROOT)] if kind == "editable" else [str(built_by_pip(folder / "wheels"))]
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--ignore-installed"]
    pip("--python", str(folder / "bin" / "python"), "install", *options, *what)
    return folder / "bin" / "python"


def add_unfortunate_files(folder: Path) -> None:
    """Write files that must not be imported, except `workers` by a user's own code."""
    for name in OF_USERS:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("OWNER = 'user'\n" if name.startswith("workers") else "raise RuntimeError(__file__)\n")

"""Static checks of the Dockerfiles; the tests can't build images."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlpack.config.redaction import looks_secret

ROOT = Path(__file__).parents[3]
IMAGES = [ROOT / "docker" / f"{name}.Dockerfile" for name in ("cpu", "cuda")]
KNOWN = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "CMD"}
both = pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return name and text of each instruction; comments are dropped, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def of(path: Path, name: str) -> list[str]:
    return [text for kind, text in instructions(path) if kind == name]


def sources(path: Path) -> list[str]:
    return [word for text in of(path, "COPY") for word in text.split()[:-1]]


def kept_by_dockerignore(source: str) -> bool:
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(source, line.lstrip("!")):
            kept = line.startswith("!")
    return kept


@both
def test_instructions_are_known_and_begin_with_a_pinned_python_of_the_makefiles(path):
    assert {name for name, _ in instructions(path)} <= KNOWN
    (base,) = of(path, "FROM")
    (python,) = re.findall(r"^PYTHON \?= python([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"python:{re.escape(python)}-slim-\w+", base)
    assert instructions(path)[0][0] == "FROM"


@both
def test_versions_are_those_of_the_makefile_and_of_the_constraints(path):
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"TORCH={torch}" in of(path, "ARG")
    installs = [text for text in of(path, "RUN") if text.startswith("pip install")]
    assert installs[0].endswith('--index-url "$TORCH_INDEX" "$TORCH"')
    assert "--constraint constraints.txt" in installs[1]
    assert len(installs) == 2


@both
def test_copied_paths_exist_and_include_everything_that_the_wheel_needs(path):
    copied = sources(path)
    assert all((ROOT / source).exists() and kept_by_dockerignore(source) for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*packages, project["project"]["readme"], *project["project"]["license-files"]} <= set(copied)
    assert not any(kept_by_dockerignore(name) for name in (".git", ".env", "runs", "wandb", ".venv", "token"))


@both
def test_a_user_without_privileges_runs_it_and_no_secret_is_in_it(path):
    *_, last = of(path, "USER")
    assert last == "1000"
    assert "--uid 1000" in " ".join(of(path, "RUN"))
    names = [word.partition("=")[0] for name in ("ENV", "ARG") for text in of(path, name) for word in text.split()]
    assert not any(looks_secret(name, "x") for name in names)
    assert instructions(path)[-1] == ("CMD", '["rlpack", "--help"]')


def test_the_copied_files_suffice_for_the_default_run(tmp_path):
    for source in sources(IMAGES[0]):
        subprocess.run(["cp", "-r", source, str(tmp_path)], cwd=ROOT, check=True)
    code = "import rlpack.cli.main as m, sys; print(m.__file__); sys.exit(m.main(['train', '--cfg', 'job']))"
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd="/",
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert shown.stdout.startswith(str(tmp_path))
    assert "target: rlpack.recipes.grpo" in shown.stdout

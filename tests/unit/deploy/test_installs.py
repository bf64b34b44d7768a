"""What an install adds to Python's import path: `rlpack`, and no name that a user's own code may have."""

import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# What users may well have where they run commands, and what our checkout or the standard library has too.
OF_USERS = (
    "workers/__init__.py", "recipes/__init__.py", "configs/__init__.py", "random.py", "types.py", "datasets.py",
)  # fmt: skip
OF_THE_CHECKOUT = ("workers", "recipes", "configs", "tests", "benchmarks", "docs", "examples")
RECIPE = """
from rlpack.config.recipes import RecipeSpec

SPEC = RecipeSpec(roles=("actor",))


def main(config):
    import random, types
    import rlpack.configs, rlpack.recipes, rlpack.workers
    import workers
    print(workers.OWNER, rlpack.workers.__name__, random.random() < 1, types.ModuleType("x").__name__)
"""


def build(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """Build a distribution of `source` as pip does, and return its file."""
    code = f"import sys, hatchling.build as b; print(b.build_{kind}(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True, check=True, timeout=120
    )
    return folder / built.stdout.split()[-1]


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, tmp_path_factory) -> Path:
    """Return the interpreter of a new environment with rlpack installed, and this environment's dependencies."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(build(request.param, folder)) as wheel:
        wheel.extractall(packages)
    # A line of a .pth file adds a folder without reading the .pth files in it, such as the checkout's own.
    dependencies = [path for path in map(Path, sys.path) if "site-packages" in path.parts]
    dependencies += [Path(path) for path in site.getsitepackages()]
    (packages / "dependencies.pth").write_text("\n".join(map(str, dict.fromkeys(dependencies))))
    return folder / "bin" / "python"


@pytest.fixture
def user_folder(tmp_path) -> Path:
    """Return a working directory with files of unfortunate names; only what is imported on purpose may be imported."""
    for name in OF_USERS:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("OWNER = 'user'\n" if name.startswith("workers") else "raise RuntimeError(__file__)\n")
    (tmp_path / "my_recipe.py").write_text(RECIPE)
    return tmp_path


def rlpack(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the console script in `folder`: the working directory is not on its path at the start."""
    code = "import sys; from rlpack.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [str(python), "-P", "-c", code, *words]
    return subprocess.run(
        command, cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=120
    )


def test_only_rlpack_is_importable(python, tmp_path):
    code = f"import importlib.util as u, rlpack.workers; print([n for n in {OF_THE_CHECKOUT} if u.find_spec(n)])"
    shown = subprocess.run(
        [str(python), "-P", "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[]\n"


def test_code_of_a_user_and_of_rlpack_never_collide(python, user_folder):
    # With an address, Ray is left to the recipe, which doesn't use it.
    words = ("train", "recipe.target=my_recipe", "sft_warmup.steps=0", "placement.address=127.0.0.1:1")
    ended = rlpack(python, user_folder, *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "user rlpack.workers True x\n"


@pytest.mark.parametrize("name", ["rlpack.py", "rlpack/__init__.py"])
def test_a_module_that_ranks_would_import_instead_of_rlpack_is_refused(python, user_folder, name):
    path = user_folder / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    ended = rlpack(python, user_folder, "train", "recipe.target=my_recipe", "sft_warmup.steps=0")
    assert ended.returncode == 2
    assert f"{path} would be imported instead of the installed rlpack; rename it" in ended.stderr


def test_a_wheel_holds_the_linked_folders_as_files_and_the_source_distribution_builds_the_same(tmp_path):
    pytest.importorskip("hatchling")
    wheel = zipfile.ZipFile(build("wheel", tmp_path))
    names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"rlpack"}
    assert {f"rlpack/{name}" for name in ("workers/actor.py", "recipes/grpo.py", "configs/train.yaml")} <= names
    assert "rlpack/config/foreign_names.yaml" in names
    with tarfile.open(build("sdist", tmp_path)) as source:
        source.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    (tmp_path / "again").mkdir()
    again = zipfile.ZipFile(build("wheel", tmp_path / "again", unpacked))
    assert {info.filename: info.CRC for info in again.infolist()} == {i.filename: i.CRC for i in wheel.infolist()}

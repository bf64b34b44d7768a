"""What an install adds to Python's import path: `rlpack`, and no name that a user's own code may have."""

import shlex
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.installs import add_unfortunate_files, build, environment_with

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


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, tmp_path_factory) -> Path:
    """Return the interpreter of a new environment with rlpack installed."""
    return environment_with(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def user_folder(tmp_path) -> Path:
    """Return a working directory with files of unfortunate names; only what is imported on purpose may be imported."""
    add_unfortunate_files(tmp_path)
    (tmp_path / "my_recipe.py").write_text(RECIPE)
    return tmp_path


def rlpack(
    python: Path, folder: Path, *words: str, options: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the console script in `folder`: the working directory is not on its path at the start."""
    code = "import sys; from rlpack.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [str(python), "-P", *options, "-c", code, *words]
    return subprocess.run(
        command, cwd=folder, env={"PATH": "/usr/bin:/bin"} | environment, capture_output=True, text=True, timeout=120
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
def test_a_module_named_rlpack_is_refused_only_where_ranks_would_import_it(python, user_folder, name):
    path = user_folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise RuntimeError(__file__)\n")
    words = ("train", "recipe.target=my_recipe", "sft_warmup.steps=0", "placement.address=127.0.0.1:1")
    ended = rlpack(python, user_folder, *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    # The driver ignores PYTHONPATH here (-E); Ray's workers would not.
    ended = rlpack(python, user_folder, *words, options=("-E",), PYTHONPATH=str(user_folder))
    assert ended.returncode == 2
    assert f"{path} would be imported instead of the running rlpack; remove its folder from PYTHONPATH" in ended.stderr


def test_the_printed_command_installs_the_same_rlpack_again_with_the_extra(python, tmp_path):
    code = "from rlpack.installation import install_command; print(install_command('math'))"
    shown = subprocess.run([str(python), "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    # Without an index, pip finds only what the command itself names.
    command = [*shlex.split(shown.stdout), "--no-index", "--no-deps", "--no-build-isolation", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert command[0] == str(python)
    assert "does not provide the extra" not in done.stdout + done.stderr


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

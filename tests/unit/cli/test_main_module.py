"""`python -m rlpack`: files of the working directory replace no module."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

FAILING = "raise RuntimeError(__file__)\n"
# Modules that Python loads before rlpack, and without which it ends.
OF_PYTHON = {"types", "functools", "collections", "keyword", "operator", "reprlib", "contextlib", "importlib"}


def run(folder, *words):
    command = [sys.executable, *words, "train", "--cfg", "job"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("is_package", [False, True])
def test_a_module_that_python_took_from_the_working_directory_is_taken_from_its_own(tmp_path, is_package):
    (tmp_path / "warnings").mkdir()
    path = tmp_path / "warnings" / "__init__.py" if is_package else tmp_path / "warnings.py"
    path.write_text("mine = True\n")
    if not is_package:
        (tmp_path / "warnings").rmdir()
    ended = run(tmp_path, "-m", "rlpack")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "trainer:" in ended.stdout


@pytest.mark.parametrize("words", [("-m", "rlpack"), ("-P", "-m", "rlpack")], ids=" ".join)
def test_no_file_of_the_working_directory_replaces_a_standard_module(tmp_path, words):
    names = {name for name in sys.stdlib_module_names if not name.startswith("_") and find_spec(name) is not None}
    for name in names if "-P" in words else names - OF_PYTHON - {"warnings"}:
        (tmp_path / f"{name}.py").write_text(FAILING)
    ended = run(tmp_path, *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "trainer:" in ended.stdout

"""Hints about missing packages fit the installation, and none installs the `rlpack` of PyPI, another project."""

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rlpack
from rlpack import installation
from rlpack.config.compose import compose
from rlpack.installation import EXTRAS, RAY_JOB, how_to_install, install_command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def direct_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that rlpack is imported from site-packages, and return the record of where pip had it from."""
    (package := tmp_path / "site-packages" / "rlpack").mkdir(parents=True)
    (metadata := tmp_path / "site-packages" / "rlpack_train-0.1.0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rlpack-train\nVersion: 0.1.0\n")
    monkeypatch.setattr(rlpack, "__file__", str(package / "__init__.py"))
    found = importlib.metadata.Distribution.at(metadata)
    monkeypatch.setattr(installation, "distribution", {"rlpack-train": found}.__getitem__)
    return metadata / "direct_url.json"


def arguments(command: str) -> list[str]:
    """Return what a command of this interpreter's pip is asked to install."""
    words = shlex.split(command)
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    return words[4:]


def test_a_checkout_is_installed_again_with_the_extra():
    assert arguments(install_command("math")) == ["--editable", f"{ROOT}[math]"]


@pytest.mark.parametrize("name", ["rlpack_train-0.1.0-py3-none-any.whl", "a folder of sources"])
def test_a_local_file_or_folder_is_installed_again_with_the_extra(direct_url: Path, tmp_path: Path, name: str):
    source = tmp_path / name
    source.touch()
    direct_url.write_text(json.dumps({"url": source.as_uri(), "archive_info": {}}))
    assert arguments(install_command("eight-bit")) == [f"{source}[eight-bit]"]
    source.unlink()
    assert arguments(install_command("eight-bit")) == ["torchao>=0.16"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "rlpack-train[math] @ git+https://host/r.git@abc",
        ),
        ({"url": "https://host/r.whl", "archive_info": {}}, "rlpack-train[math] @ https://host/r.whl"),
        ({}, "math-verify>=0.9"),
        (None, "math-verify>=0.9"),
        ([], "math-verify>=0.9"),
    ],
)
def test_an_installation_from_elsewhere_is_repeated_or_its_packages_are_named(direct_url: Path, record, expected: str):
    if record is not None:
        direct_url.write_text(json.dumps(record))
    assert arguments(install_command("math")) == [expected]


def test_a_hint_leaves_a_loaded_distutils_alone():
    code = "import distutils.util, sys, rlpack.installation as i; i.install_command('math'); sys.modules['distutils']"
    flags = ("-W", "error::UserWarning", "-W", "ignore::DeprecationWarning")
    ended = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_environment_of_uv_without_pip_gets_a_command_of_uv(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installation, "distributions", lambda name: iter(()))
    monkeypatch.setattr(installation.shutil, "which", lambda name: f"/usr/bin/{name}")
    words = shlex.split(install_command("math"))
    assert words == ["uv", "pip", "install", "--python", sys.executable, "--editable", f"{ROOT}[math]"]


def test_a_ray_job_is_submitted_with_the_package():
    hint = how_to_install("math", {RAY_JOB: "{}"})
    (override,) = [word for word in shlex.split(hint.partition(", or ")[0]) if "=" in word]
    assert compose([override]).job.pip == ("math-verify>=0.9",)
    assert how_to_install("math", {}) == f"run `{install_command('math')}`"


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name: tuple(packages) for name, packages in project["optional-dependencies"].items() if name != "dev"}
    assert declared == EXTRAS
    assert project["name"] == installation.DISTRIBUTION
    assert project["scripts"] == {"rlpack": "rlpack.cli.main:main"}


def test_no_file_has_pip_look_for_another_project_of_our_name():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    theirs = re.compile(r"""pip install [^\n]*\brlpack(?![\w/.:-])|\brlpack\[[a-z]|dependencies = \["rlpack["\[=<>~]""")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or path == Path(__file__).resolve():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {match[0]}" for match in theirs.finditer(text)]
    assert found == []

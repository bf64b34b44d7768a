import os
import zipfile
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import create_package

import rlpack
from rlpack.config.errors import ConfigError
from rlpack.config.sections.submission import JOB_FILES
from rlpack.distributed.jobs import upload
from rlpack.distributed.jobs.upload import list_upload

FILES = {
    "train.py": 10,
    "data/prompts.jsonl": 2000,
    "data/runs/kept.txt": 5,
    ".gitignore": None,
    "secret/.gitignore": None,
    "secret/key": 4,
    ".git/objects/pack": 10**6,
    ".venv/lib/torch.so": 10**6,
    "pkg/__pycache__/a.pyc": 10**6,
    "runs/mine/model.bin": 10**6,
    "ignored.bin": 10**6,
    "weights.safetensors": 10**6,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size or 0))
    (tmp_path / "project" / ".gitignore").write_text("ignored.bin\n")
    (tmp_path / "project" / "secret" / ".gitignore").write_text("*\n")
    return tmp_path / "project"


def test_what_is_counted_is_what_ray_packs(folder, tmp_path):
    found = list_upload(folder, ["*.safetensors"])
    with found.staged() as staged:
        create_package(str(staged), tmp_path / "package.zip", True)
    with zipfile.ZipFile(tmp_path / "package.zip") as packed:
        files = {Path(item.filename): item.file_size for item in packed.infolist() if not item.is_dir()}
    assert files == {JOB_FILES / path: size for path, size in found.sizes.items()}
    create_package(str(folder), tmp_path / "unstaged.zip", True, excludes=list(found.excludes))
    with zipfile.ZipFile(tmp_path / "unstaged.zip") as packed:
        assert {Path(item.filename) for item in packed.infolist() if not item.is_dir()} == set(found.sizes)
    assert set(map(str, found.sizes)) == {"train.py", "data/prompts.jsonl", "data/runs/kept.txt", ".gitignore"}
    assert (tmp_path / "package.zip").stat().st_size <= found.size < (tmp_path / "package.zip").stat().st_size + 2000


def test_no_uploaded_file_can_be_imported_from_the_folder_that_ray_unpacks(folder):
    for name in ("random.py", "types.py", "workers/__init__.py", "rlpack/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with list_upload(folder, []).staged() as staged:
        assert [path.name for path in staged.iterdir()] == [JOB_FILES]
        assert not JOB_FILES.isidentifier()
        assert (staged / JOB_FILES / "rlpack" / "__init__.py").is_file()


def test_a_job_finds_the_empty_folders_that_it_writes_into(folder):
    (folder / "out" / "plots").mkdir(parents=True)
    with list_upload(folder, []).staged() as staged:
        assert (staged / JOB_FILES / "out" / "plots").is_dir()


def test_a_checkout_provides_rlpack_itself():
    checkout = Path(rlpack.__file__).parents[1]
    with list_upload(checkout, ["tests", "benchmarks"]).staged() as staged:
        assert {path.name for path in staged.iterdir()} == {JOB_FILES, "rlpack"}
        assert (staged / "rlpack" / "workers" / "actor.py").read_bytes() == (
            checkout / "workers" / "actor.py"
        ).read_bytes()
        assert (staged / JOB_FILES / "pyproject.toml").is_file()


def test_a_folder_over_the_limit_is_refused_with_its_five_biggest_files_and_no_others(folder):
    for number in range(6):
        (folder / f"big{number}").write_bytes(bytes(3 * 2**20 + number * 2**20))
    with pytest.raises(ConfigError) as refused:
        list_upload(folder, [], limit=30 * 2**20)
    text = str(refused.value)
    biggest = "big5 (8.0 MiB), big4 (7.0 MiB), big3 (6.0 MiB), big2 (5.0 MiB), big1 (4.0 MiB);"
    assert f"MiB to upload, over Ray's limit of 30 MiB; the biggest are {biggest}" in text
    assert "name what the run doesn't need in job.excludes" in text
    assert not any(name in text for name in ("big0", ".git/", ".venv/", "runs/", "ignored.bin"))
    assert list_upload(folder, ["big*"], limit=30 * 2**20).size < 2 * 2**20


def test_rays_own_limit_is_the_default(folder):
    with (folder / "huge").open("wb") as file:
        file.truncate(600 * 2**20)  # sparse
    with pytest.raises(ConfigError, match=r"over Ray's limit of 512 MiB; the biggest are huge \(600.0 MiB\)"):
        list_upload(folder, [])


def test_a_folder_that_is_far_too_big_is_not_walked_to_its_end(folder, monkeypatch):
    monkeypatch.setattr(upload, "_WALK_S", 0.0)
    with pytest.raises(ConfigError, match=r"has more than \d"):
        list_upload(folder, [], limit=1000)


@pytest.mark.parametrize("name", ["no_such_folder", "train.py"])
def test_what_is_no_folder_is_refused(folder, name):
    with pytest.raises(ConfigError, match=rf"job.working_dir is '.*{name}', which is not a folder"):
        list_upload(folder / name, [])

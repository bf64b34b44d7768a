"""What a user may get wrong: one message with the way out, exit code 2 or 3, and no Ray.

The whole command runs, up to where it would start processes, on every row of `tests.end_to_end.bad_input`. A resumed
run is compared with a real one here, because its checkpoint takes a run.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from hydra._internal.hydra import Hydra

from rlpack.cli import environment
from rlpack.cli.main import main
from rlpack.distributed import ray_connection
from tests.end_to_end.bad_arguments import BAD_ARGUMENTS
from tests.end_to_end.bad_files import BAD_FILES, FOUND_LATER
from tests.end_to_end.bad_input import BAD_INPUT, KINDS, RUN_DIR, SMALL, BadInput
from tests.end_to_end.bad_results import TESTS
from tests.end_to_end.settings import REFERENCE, UNEVEN

ALL = (*BAD_INPUT, *BAD_FILES, *BAD_ARGUMENTS)
# Shortened values leave a message of at most a few lines.
LONGEST_MESSAGE = 3000


class RayStarted(BaseException):
    """Stands for the moment when a run would start its processes."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory of the command, in which Ray can't start, and no hub is reached."""

    def refuse(*arguments, **options):
        raise RayStarted

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds its working directory
    # Without --multirun Hydra composes everything once more, to find out whether a config asks for it.
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)  # the next test may write another
    importlib.invalidate_caches()


@pytest.fixture
def imports(monkeypatch):
    """Return a list that gets an entry when a command goes on to import the recipe and to start Ray."""
    entries = []

    def fits(placement):
        entries.append(placement)
        return False  # Ray would start while the recipe is imported, before the checks; no rank would

    monkeypatch.setattr(ray_connection, "fits_this_machine", fits)
    return entries


def contents(folder):
    return {
        path.relative_to(folder): path.lstat().st_mtime_ns
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def arguments_of(bad: BadInput) -> list[str]:
    has_run_dir = any(argument.startswith("run_dir=") for argument in bad.arguments)
    return ["train", *([] if has_run_dir else [f"run_dir={RUN_DIR}"]), *bad.arguments]


def write(bad: BadInput, folder) -> None:
    for name, content in bad.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if bad.setup is not None:
        bad.setup(folder)


def said(capsys, code, *arguments):
    """Return what a command that ends with `code` before Ray starts writes: one message, and no traceback."""
    assert main(list(arguments)) == code
    heard = capsys.readouterr()
    assert heard.err.count("rlpack train: ") == 1
    assert "Traceback" not in heard.err
    assert len(heard.err) < LONGEST_MESSAGE
    return heard.err


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in ALL if bad.code is not None])
def test_bad_input_ends_with_one_message_and_leaves_nothing(folder, imports, capsys, monkeypatch, bad):
    write(bad, folder)
    for name, value in bad.env_vars.items():
        monkeypatch.setenv(name, value)
    before = contents(folder)
    heard = said(capsys, bad.code, *arguments_of(bad))
    for words in bad.words:
        assert words in heard
    assert not imports  # which would take several seconds
    assert contents(folder) == before


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in FOUND_LATER])
def test_bad_input_that_needs_pytorch_to_be_found_ends_with_one_message_too(folder, imports, capsys, bad):
    write(bad, folder)
    before = contents(folder)
    heard = said(capsys, bad.code, *arguments_of(bad))
    for words in bad.words:
        assert words in heard
    assert contents(folder) == before


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in ALL if bad.code is None])
def test_input_that_only_looks_bad_gets_through_to_the_start_of_processes(folder, imports, capsys, bad):
    write(bad, folder)
    assert main(arguments_of(bad)) == 1
    assert "raised RayStarted" in capsys.readouterr().err
    assert imports


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in ALL if bad.name in KINDS])
def test_a_process_with_bad_input_ends_soon(tmp_path, bad):
    write(bad, tmp_path)
    before = contents(tmp_path)
    command = [sys.executable, "-m", "rlpack", *arguments_of(bad)]
    # Half a second to a second on a quiet machine; a process that imports PyTorch takes several.
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == bad.code
    assert ended.stdout == ""
    for words in bad.words:
        assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert contents(tmp_path) == before


def test_heads_that_vllm_cannot_run_end_the_command_before_any_process_starts(folder, imports, capsys, monkeypatch):
    monkeypatch.setattr(environment, "installation_problem", lambda on_gpu: None)
    heads = ("model.config.hidden_size=64", "model.config.num_attention_heads=4")
    heard = said(capsys, 2, "train", f"run_dir={RUN_DIR}", *SMALL, "rollout=vllm", *heads)
    assert "rollout.engine=vllm: the model's heads have 16 numbers, and vLLM's kernels for CPUs take 32, 64, " in heard
    assert not (folder / RUN_DIR).exists()


@pytest.mark.parametrize(("file", "test"), [pytest.param(*place, id=name) for name, place in TESTS.items()])
def test_bad_results_have_a_test_of_their_own(file, test):
    assert f"def {test}(" in (Path(__file__).parents[2] / file).read_text()


def test_every_row_of_the_table_has_a_name_of_its_own():
    names = {bad.name for bad in ALL}
    assert len(names) == len(ALL)
    assert names.issuperset(KINDS)


@pytest.mark.parametrize(
    "key", ["recipe.target={}", "roles.judge.target={}:f", "reward.function={}:f", "algorithm.loss={}:f"]
)
def test_a_module_that_exits_on_import_is_an_error_like_any_other(folder, imports, capsys, key):
    name = f"leaving_{key[:3]}"
    (folder / f"{name}.py").write_text("import sys\nsys.exit(0)\ndef f(): ...\n")
    heard = said(capsys, 2, "train", f"run_dir={RUN_DIR}", *SMALL, key.format(name))
    assert name in heard
    assert "SystemExit" in heard


def test_a_run_directory_that_is_taken_is_left_as_it_was(folder, capsys, uninterrupted):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.run_dir.rglob("*")}
    heard = said(capsys, 2, "train", f"run_dir={uninterrupted.run_dir}")
    assert "already contains a run; continue it with resume=auto" in heard
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.run_dir.rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=2", "seed is 2 and the checkpoint"),
        ("data.generator.largest_operand=3", "data.generator.largest_operand is 3 and the checkpoint"),
        ("model=small", "model.config.hidden_size (256, was "),
        ("sft_warmup.steps=41", "sft_warmup.steps is 41 and the checkpoint"),
        ("trainer.steps=1", "trainer.steps is 1, but the run in run_dir="),
    ],
)
def test_a_run_is_not_resumed_as_another_one(folder, capsys, uninterrupted, change, message):
    overrides = [*UNEVEN, *REFERENCE, "trainer.steps=9", f"run_dir={uninterrupted.run_dir}", "resume=auto", change]
    before = (uninterrupted.run_dir / "config.yaml").read_text()
    heard = said(capsys, 2, "train", *overrides)
    assert message in heard
    assert "or choose another run_dir" in heard
    assert (uninterrupted.run_dir / "config.yaml").read_text() == before

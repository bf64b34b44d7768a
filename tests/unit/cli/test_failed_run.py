"""The exit code and the message of the error that ends a command."""

import sys
from pathlib import Path

import pytest

from rlpack.batch.errors import DataError
from rlpack.cli.failed_run import CONFIG_WRONG, DATA_WRONG, RUN_FAILED, report_failure
from rlpack.data.length_files import read_lengths
from rlpack.distributed.errors import UnavailableError
from rlpack.observe.errors import MetricError, SinkUnavailableError
from rlpack.run_log import attached_log
from tests.builders import tiny_rollouts

UNAVAILABLE = [(UnavailableError("Ray did not start"), 75), (SinkUnavailableError("no answer"), 75)]
RECIPE = '''def draw(rollouts):
    """Add a column that the batch has."""
    return rollouts.union({"uid": rollouts["uid"]}).union(rollouts)
'''


def test_a_users_own_module_that_misuses_a_batch_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "own_recipe_draw.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import own_recipe_draw  # pyright: ignore[reportMissingImports]

    with pytest.raises(DataError) as raised:
        own_recipe_draw.draw(tiny_rollouts([(2, 3)]))
    assert report_failure(raised.value) == RUN_FAILED
    heard = capsys.readouterr().err
    assert heard.startswith("rlpack train: own_recipe_draw.py, line 3, in draw: columns ['")
    del sys.modules["own_recipe_draw"]


def test_the_last_line_names_the_line_of_a_users_module_that_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "own_recipe_main.py").write_text("import json\n\ndef main(text):\n    return json.loads(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import own_recipe_main  # pyright: ignore[reportMissingImports]

    with pytest.raises(ValueError, match="Expecting") as raised:
        own_recipe_main.main("[")
    assert report_failure(raised.value) == RUN_FAILED
    heard = capsys.readouterr().err.splitlines()
    assert heard[0].startswith("Traceback")
    assert heard[-1].startswith("rlpack train: own_recipe_main.py, line 4, in main: JSONDecodeError: Expecting")
    del sys.modules["own_recipe_main"]


def test_installed_packages_are_not_the_users_code_and_a_deleted_working_directory_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    packages, deleted = tmp_path / "site-packages", tmp_path / "deleted"
    packages.mkdir()
    deleted.mkdir()
    (packages / "some_package.py").write_text("def fail():\n    raise KeyError('weight')\n")
    (tmp_path / "own_recipe_call.py").write_text("import some_package\n\ndef main():\n    some_package.fail()\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    import own_recipe_call  # pyright: ignore[reportMissingImports]

    with pytest.raises(KeyError) as raised:
        own_recipe_call.main()
    assert report_failure(raised.value) == RUN_FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"rlpack train: {tmp_path}/own_recipe_call.py, line 4, in main: KeyError: 'weight'"
    del sys.modules["own_recipe_call"], sys.modules["some_package"]


def test_wrong_data_have_their_own_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "lengths.txt").write_text("1\nmany\n")
    with pytest.raises(DataError) as raised:
        read_lengths(tmp_path / "lengths.txt")
    assert report_failure(raised.value) == DATA_WRONG
    assert "line" not in capsys.readouterr().err.partition(":")[0]


@pytest.mark.parametrize(
    ("error", "code"), [(DataError("rows"), DATA_WRONG), (MetricError("value"), CONFIG_WRONG), *UNAVAILABLE]
)
def test_errors_after_the_first_step_are_failures_of_the_run(error: Exception, code: int):
    def raised() -> Exception:
        try:
            raise error
        except type(error) as found:
            return found

    with attached_log("driver") as log:
        assert report_failure(raised()) == code
        log.has_steps = True
        assert report_failure(raised()) == RUN_FAILED

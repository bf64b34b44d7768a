"""The cause of an error of vLLM, from its log."""

import json
import logging
import os
import subprocess
import sys

import pytest

from rlpack.rollout.vllm.engine_log import EngineLog

TRACEBACK = """\
2026-11-23 08:00:00 41 WARNING vllm.a: SomeError: not this one
2026-11-23 08:00:01 41 ERROR vllm.v1.engine.core: EngineCore failed to start.
Traceback (most recent call last):
  File "a.py", line 3, in f
    raise ValueError("bad")
ValueError: No available memory for the cache blocks.
RuntimeError: Engine core initialization failed.
"""


def test_the_first_error_that_vllm_logged_is_the_cause():
    log = EngineLog()
    log.path.write_text(TRACEBACK)
    assert log.explain(RuntimeError("see above")) == "ValueError: No available memory for the cache blocks."


def test_a_later_error_has_a_cause_of_its_own():
    log = EngineLog()
    log.path.write_text(TRACEBACK)
    log.explain(RuntimeError())
    assert log.explain(KeyError("key")) == "KeyError: 'key'"
    with log.path.open("a") as file:
        file.write("pkg.mod.OtherError: disk full\n")
    assert log.explain(RuntimeError()) == "pkg.mod.OtherError: disk full"


def test_without_a_log_the_error_is_its_own_cause_in_one_line():
    error = ValueError("1 validation error\nkey\n  Input should be 'a'\n    For further information visit https://x")
    assert EngineLog().explain(error) == "ValueError: 1 validation error key Input should be 'a'"


def test_the_configuration_writes_warnings_into_the_log():
    log = EngineLog()
    settings = json.loads(log.config.read_text())
    assert settings["handlers"]["file"]["filename"] == str(log.path)
    assert settings["loggers"]["vllm"]["level"] == "WARNING"


def test_standard_error_goes_to_the_log_and_that_of_processes_begun_then_for_good(capfd: pytest.CaptureFixture[str]):
    log, said = EngineLog(), "import sys; sys.stdin.readline(); print('from a child', file=sys.stderr)"
    with log.standard_error():
        os.write(2, b"from C\n")
        child = subprocess.Popen([sys.executable, "-c", said], stdin=subprocess.PIPE)
    os.write(2, b"afterwards\n")
    child.communicate(b"now\n", timeout=60)
    assert capfd.readouterr().err == "afterwards\n"
    assert sorted(log.path.read_text().splitlines()) == ["from C", "from a child"]


def test_standard_error_is_restored_after_an_error(capfd: pytest.CaptureFixture[str]):
    log = EngineLog()
    with pytest.raises(KeyError), log.standard_error():
        raise KeyError
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"
    assert log.path.read_text() == ""


def test_what_was_logged_while_all_went_well_is_recorded_once_as_information(caplog: pytest.LogCaptureFixture):
    log = EngineLog()
    with caplog.at_level(logging.INFO):
        log.path.write_text("a notice\n")
        log.record()
        log.record()
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("INFO", "vLLM logged:\na notice")]

"""Usage of calls, and the warning about slow ones."""

import pytest

from rlpack.distributed.usage import Measured, Usage, UsageLog


def test_a_call_over_half_of_its_deadline_causes_one_warning_per_method(caplog: pytest.LogCaptureFixture):
    log = UsageLog()
    for method, seconds in (("train_step", 40.0), ("train_step", 60.0), ("train_step", 70.0), ("logprobs", 51.0)):
        results = {0: Measured("first", Usage(1.0)), 1: Measured("second", Usage(seconds))}
        assert log.unwrap("actor", method, results, 100.0) == {0: "first", 1: "second"}
    log.unwrap("actor", "save", {0: Measured(None, Usage(1e6))})  # it has a deadline that no key sets
    assert [text.partition(",")[0] for text in caplog.messages] == [
        "role actor: a call of train_step took 60 s",
        "role actor: a call of logprobs took 51 s",
    ]
    assert "over half of its deadline, placement.call_timeout_s=100; " in caplog.messages[0]
    assert "raise placement.call_timeout_s if calls may take longer" in caplog.messages[0]

import pickle
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from rlpack.rewards.errors import PoolError, RewardError, TooManyFailuresError
from rlpack.rewards.pool.call_queue import FunctionSpec, PoolSettings
from rlpack.rewards.reward_result import FAILURES, RewardResult
from rlpack.rewards.scoring import FailureRate, RewardScorer
from tests.unit.rewards import samples

ERROR = RewardResult(problem="error", detail="such")


@pytest.fixture(scope="module")
def scorers():
    """One scorer for each set of functions that tests ask for."""
    opened = {}

    def scorer(*names, weights=None, max_failures=1.0, arguments=None, timeout_s=10.0, **settings):
        key = repr((names, weights, max_failures, arguments, timeout_s, settings))
        if key not in opened:
            targets = {
                name: FunctionSpec(f"tests.unit.rewards.samples:{name}", arguments or {}, timeout_s) for name in names
            }
            weights = weights or dict.fromkeys(names, 1.0)
            opened[key] = RewardScorer(targets, weights, PoolSettings(**settings), max_failures=max_failures)
        return opened[key]

    yield scorer
    for found in opened.values():
        found.close()


def texts(*completions, **columns):
    return {"prompt": ["a"] * len(completions), "completion": list(completions), **columns}


def score(scorer, *completions, **columns):
    return scorer.score(texts(*completions, **columns), len(completions))


def test_functions_of_every_signature_get_the_columns_that_they_name(scorers):
    names = ("batched", "everything", "single", "single_completion", "answers_alone", "waiting", "waiting_batch",
             "gives_an_awaitable", "instance")  # fmt: skip
    found = score(scorers(*names, rows_per_call=4), "b", "cc", "b", answer=["ab", "x", "bb"], level=[1, 2, 3])
    parts = {name: part.tolist() for name, part in found.by_function.items()}
    assert parts.pop("everything")[0] in (1.0, 2.0)  # of a call, which has a part of the rows
    assert parts == {
        "batched": [2, 4, 4],
        "single": [1, 0, 0],
        "single_completion": [1, 0, 1],
        "answers_alone": [1, 0, 0],
        "waiting": [1, 0, 1],
        "waiting_batch": [1, 1, 1],
        "gives_an_awaitable": [1, 1, 1],
        "instance": [2, 2, 2],
    }


def test_verls_function_gets_the_right_answer_wherever_its_datasets_have_it(scorers):
    scorer = scorers("compute_score")
    sources = {"data_source": ["sums", "sums"]}
    assert score(scorer, "1", "2", answer=["1", "1"], **sources).values.tolist() == [1, 0]
    assert score(scorer, "1", "2", ground_truth=["1", "2"], answer=["2", "1"], **sources).values.tolist() == [1, 1]
    nested = [{"ground_truth": "2", "style": "rule"}] * 2
    extra = [{"bonus": 0.5}, None]
    assert score(scorer, "2", "2", reward_model=nested, extra_info=extra, **sources).values.tolist() == [1.5, 1]
    given = scorers("compute_score", arguments={"data_source": "sums"})
    assert score(given, "1", answer=["1"]).values.tolist() == [1.0]


def test_the_rows_of_an_async_function_wait_at_one_time(scorers):
    scorer = scorers("waiting", rows_per_call=32)
    score(scorer, "b", answer=["b"])
    began = time.monotonic()
    found = score(scorer, *["b"] * 64, answer=["b"] * 64)
    assert time.monotonic() - began < 64 * 0.2 / 2
    assert found.values.tolist() == [1.0] * 64


def test_rewards_are_summed_with_weights_and_each_function_has_its_own_column(scorers):
    found = score(scorers("half", "single_completion", weights={"half": 2.0, "single_completion": -0.25}), "b", "c")
    assert found.values.dtype == torch.float32
    assert found.values.tolist() == [0.75, 1.0]
    assert found.by_function["half"].tolist() == [0.5, 0.5]


def test_none_adds_nothing_and_failures_are_quarantined(scorers, caplog):
    found = score(scorers("seldom", "half"), "none", "nan", "text", "good")
    assert found.values.tolist() == [0.5, 0, 0, 1]
    assert found.quarantined.tolist() == [False, True, True, False]
    assert found.counts == {"nan": 1, "invalid": 1}
    assert found.failures.tolist() == [0, 0, 1 + FAILURES.index("invalid"), 0]
    assert "2 of 4 rows are quarantined (invalid: 1, nan: 1); no loss counts them" in caplog.text
    assert found.by_function["seldom"].isnan().tolist() == [True, True, True, False]


def test_rows_without_any_reward_are_quarantined_with_a_warning_every_time(scorers, caplog):
    scorer = scorers("seldom")
    for _ in range(2):
        caplog.clear()
        assert score(scorer, "none", "none").counts == {"none": 2}
        assert "all 2 rows are quarantined (none: 2); no row is left to train on" in caplog.text


def test_the_row_that_raises_is_found_and_the_others_keep_their_rewards(scorers):
    found = score(scorers("fails_on_some", rows_per_call=8), *["good"] * 6, "raise", *["good"] * 9)
    assert found.quarantined.nonzero().flatten().tolist() == [6]
    assert found.values.sum() == 15


def test_a_function_that_always_fails_ends_the_run_with_its_own_file_and_line(scorers):
    line = samples.broken.__code__.co_firstlineno + 1
    place = rf"\({re.escape(samples.__file__)}, line {line}\)"
    scorer = scorers("broken", max_failures=0.1)
    with pytest.raises(
        TooManyFailuresError, match=rf"samples:broken on row \d+: error \(JSONDecodeError: .* {place}\)"
    ) as e:
        score(scorer, *["no JSON"] * 16)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_the_rest_of_an_abandoned_batch_is_skipped(scorers):
    began = time.monotonic()
    with pytest.raises(TooManyFailuresError, match=r"failed on 64 of 64 rows \(error: \d+, skipped: \d+\)"):
        score(scorers("broken", max_failures=0.1, processes=1, batch_timeout_s=30.0), *["no JSON"] * 64)
    assert time.monotonic() - began < 20


def test_the_warning_of_quarantined_rows_has_the_first_failure_and_not_a_skipped_row(scorers, caplog):
    scorer = scorers("slow_or_broken", max_failures=0.1, processes=2, rows_per_call=1, batch_timeout_s=30.0)
    with pytest.raises(TooManyFailuresError):
        score(scorer, "slow", *["fast"] * 63)
    (record,) = caplog.records
    assert re.search(
        r"all 64 rows are quarantined \(error: 64\); no row is left to train on; fix the first failure: "
        r"tests.unit.rewards.samples:slow_or_broken on row 1: error \(KeyError: 'no such key'",
        record.getMessage(),
    )
    assert "finite" not in record.getMessage()


def test_a_failure_names_the_prompt_of_its_row(scorers, caplog):
    columns = {"prompt": ["p"] * 2, "completion": ["1.0", "no JSON"], "uid": ["train-3", "train-8"]}
    scorers("broken", max_failures=0.9, processes=1).score(columns, 2)
    assert "samples:broken on row 1 (prompt train-8): error (JSONDecodeError: " in caplog.text


def test_what_failing_functions_print_is_in_the_error_even_if_their_processes_are_gone(scorers):
    with pytest.raises(TooManyFailuresError, match=r"no reward.*; functions wrote: ….*saw .*fast"):
        score(scorers("talks_and_fails", max_failures=0.1, processes=2, rows_per_call=1), *["fast"] * 64)
    scorer = scorers("prints_and_dies", max_failures=0.1, processes=1)
    with pytest.raises(TooManyFailuresError, match=r"functions wrote: ….*last words"):
        score(scorer, *["a"] * 16)


def test_a_refusal_of_the_sandbox_names_the_sandbox_and_where_files_can_be_written(scorers):
    with pytest.raises(TooManyFailuresError, match=r"RuntimeError: could not look .*; reward functions run in rlpack's "
                       r"sandbox.*write below \$TMPDIR"):  # fmt: skip
        score(scorers("refused", max_failures=0.1), *["a"] * 16)
    with pytest.raises(TooManyFailuresError) as caught:
        score(scorers("broken", max_failures=0.1), *["no JSON"] * 16)
    assert "sandbox" not in str(caught.value)


def test_a_file_that_is_not_found_is_an_error_that_says_where_functions_run(scorers):
    with pytest.raises(TooManyFailuresError, match=r"FileNotFoundError: .*'words\.txt'") as caught:
        score(scorers("reads_a_relative_path", max_failures=0.1), *["a"] * 16)
    hint = "are a private directory; build the paths of your files from __file__"
    assert f"; the working directory and HOME of reward functions {hint}" in str(caught.value)
    with pytest.raises(TooManyFailuresError, match=r"FileNotFoundError: .*'no-such-program'") as caught:
        score(scorers("runs_a_program", max_failures=0.1), *["a"] * 16)
    assert hint not in str(caught.value)


def test_a_function_that_returns_another_number_of_rewards_ends_the_run(scorers):
    with pytest.raises(TooManyFailuresError, match=r"samples:short on row 0: invalid \(returned 1 rewards for \d+"):
        score(scorers("short", max_failures=0.1), *"abcdefghijklmnop")


def test_the_rate_of_failures_is_that_of_the_last_hundred_rows():
    rate = FailureRate(0.1)
    good = [RewardResult(1.0)] * 5
    for _ in range(10):
        rate.record([*good, ERROR], "f")
    with pytest.raises(TooManyFailuresError, match=r"failed on 1 of 6 rows \(error: 1\), 11 of the last 66;.*is 0\.1"):
        rate.record([*good, ERROR], "f")
    seldom = FailureRate(0.1)
    for _ in range(100):
        seldom.record([*good * 3, ERROR], "f")


@pytest.mark.parametrize(("rows", "allowed"), [(10, 10), (100, 10), (200, 20)])
def test_the_first_batch_may_fail_as_often_as_a_hundred_rows(rows, allowed):
    assert FailureRate(0.1).allowed(rows) == allowed
    assert FailureRate(1.0).allowed(rows) == float("inf")
    FailureRate(1.0).record([ERROR] * rows, "f")


def test_a_few_rows_that_all_fail_end_the_run_at_its_start_alone():
    later = FailureRate(0.1)
    later.record([RewardResult(1.0)] * 50, "f")
    later.record([ERROR] * 9, "f")
    hard_group = FailureRate(0.2)
    hard_group.record([ERROR] * 8, "f")
    with pytest.raises(TooManyFailuresError, match="failed on 8 of 8 rows"):
        hard_group.record([ERROR] * 8, "f")


def test_no_failure_is_too_many_where_none_may_be():
    rate = FailureRate(0.0)
    rate.record([RewardResult(1.0)], "f")
    with pytest.raises(TooManyFailuresError):
        rate.record([RewardResult(1.0), ERROR], "f")


def test_failures_of_batches_that_overlap_are_added_up():
    rate = FailureRate(0.1)
    allowed = [rate.allowed(8) for _ in range(2)]
    assert allowed == [10, 10]
    rate.record([*[ERROR] * 6, *[RewardResult(1.0)] * 2], "f", allowed[0])
    with pytest.raises(TooManyFailuresError, match="failed on 6 of 8 rows"):
        rate.record([*[ERROR] * 6, *[RewardResult(1.0)] * 2], "f", allowed[1])


def test_a_batch_that_skipped_rows_ends_the_run_even_if_others_moved_the_window_meanwhile():
    rate = FailureRate(0.1)
    rate.record([*[ERROR] * 9, *[RewardResult(1.0)] * 31], "f")
    allowed = rate.allowed(4)
    assert allowed == 1
    for _ in range(2):
        rate.record([RewardResult(1.0)] * 60, "f", rate.allowed(60))
    assert rate.allowed(4) > 4
    with pytest.raises(TooManyFailuresError, match="failed on 4 of 4 rows"):
        rate.record([ERROR] * 4, "f", allowed)


def test_threads_can_share_a_rate_of_failures():
    rate, interval = FailureRate(0.5), sys.getswitchinterval()

    def record() -> None:
        for _ in range(300):
            rate.record([RewardResult(1.0)], "f", rate.allowed(1))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for recorded in [threads.submit(record) for _ in range(4)]:
                recorded.result(60)
    finally:
        sys.setswitchinterval(interval)
    assert rate.allowed(1) == 50


def test_output_is_shown_once_without_its_control_characters_and_counted(scorers, caplog):
    scorer = scorers("talks", processes=1)
    assert score(scorer, "one").output_bytes == len("\x1b[31mred one\n")
    assert "[31mred one" in caplog.text
    assert "\x1b" not in caplog.text
    caplog.clear()
    assert score(scorer, "two").output_bytes == len("\x1b[31mred two\n")
    assert not caplog.records


def test_texts_of_any_kind_arrive_as_they_are(scorers):
    odd = ["é🙂\x00", "\ud800", "a\nb", "x" * 100_000]
    found = score(scorers("batched"), *odd, level=[0] * 4)
    assert found.values.tolist() == [len(text) for text in odd]


def test_a_column_that_can_not_be_sent_is_named(scorers):
    with pytest.raises(RewardError, match=r"the column 'level' can't be sent to .*samples:batched: .*bytes"):
        score(scorers("batched"), "a", level=[b"1"])
    assert score(scorers("batched"), "a", level=[1]).values.tolist() == [2.0]


def test_no_rows_give_no_rewards(scorers):
    found = scorers("half", max_failures=0.1).score(texts(), 0)
    assert found.values.shape == (0,)
    assert found.quarantined.dtype == torch.bool


def test_a_function_that_can_not_be_loaded_is_named(tmp_path, monkeypatch):
    (tmp_path / "raising.py").write_text("import os\nraise OSError('no license')\n")
    (tmp_path / "exiting.py").write_text("import os\nos._exit(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for target, error, text in (
        (
            "raising:f",
            RewardError,
            "reward.function is 'raising:f', .* can't be imported: OSError: no license",
        ),
        ("exiting:f", PoolError, "a reward process could not start: its process exited with status 4"),
    ):
        scorer = RewardScorer({"f": FunctionSpec(target)}, {"f": 1.0}, PoolSettings(processes=1))
        try:
            with pytest.raises(error, match=text):
                scorer.score(texts("a"), 1)
        finally:
            scorer.close()


def test_a_pool_whose_supervisor_is_killed_says_so():
    before = psutil.Process().children()
    scorer = RewardScorer({"half": FunctionSpec("tests.unit.rewards.samples:half")}, {"half": 1.0}, PoolSettings())
    try:
        score(scorer, "a")
        (supervisor,) = set(psutil.Process().children()) - set(before)
        supervisor.kill()
        supervisor.wait(5.0)
        with pytest.raises(PoolError, match="the supervisor of the reward processes exited"):
            score(scorer, *["a"] * 4)
    finally:
        scorer.close()


def test_functions_that_reward_no_row_end_a_run_and_those_that_reward_one_go_on(scorers):
    scorer, prompts = scorers("lacks_a_return", max_failures=0.1), [f"prompt {number}" for number in range(60)]
    assert score(scorer, *["ab"] * 120).counts == {"none": 120}  # of a single prompt
    with pytest.raises(TooManyFailuresError, match=r"lacks_a_return: none of the 180 rows .*\(none: 180\).* return"):
        scorer.score({"prompt": prompts, "completion": ["ab"] * 60}, 60)
    scorer = scorers("rewards_one_letter", max_failures=0.1)
    for _ in range(3):
        scorer.score({"prompt": prompts, "completion": ["a", *["ab"] * 59]}, 60)
    scorer = scorers("lacks_a_return", max_failures=1.0)
    assert scorer.score({"prompt": prompts * 2, "completion": ["ab"] * 120}, 120).counts == {"none": 120}

"""The pool against hostile functions."""

import os
import resource
import socket
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from rlpack.rewards.pool.call_queue import FunctionSpec, PoolSettings
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.pool.pool import RewardPool

TIMEOUT_S = 0.5
SLACK_S = 3.0
REFILL_S = 2.0
pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="the sandbox needs Linux")


@contextmanager
def opened(*names, timeout_s=TIMEOUT_S, arguments=None, **settings):
    targets = {
        name: FunctionSpec(name if ":" in name else f"tests.unit.rewards.hostile:{name}", arguments or {}, timeout_s)
        for name in names
    }
    pool = RewardPool(targets, PoolSettings(**{"limits": Limits(memory_gb=2.0)} | settings))
    try:
        pool.wait()
        yield pool
    finally:
        pool.close()


def columns(completions, **more):
    return {"prompt": ["p"] * len(completions), "completion": list(completions), **more}


def problems(results):
    return dict(Counter(result.problem for result in results))


@pytest.fixture(scope="module", autouse=True)
def others():
    """Record processes that other test modules left running, such as a fork server."""
    OTHERS.update(process.pid for process in psutil.Process().children(recursive=True))


OTHERS: set[int] = set()


def descendants():
    return [process.pid for process in psutil.Process().children(recursive=True) if process.pid not in OTHERS]


def assert_small(pool):
    """Wait until only the supervisor and two workers run; deleting a worker's directory takes another process."""
    deadline = time.monotonic() + REFILL_S
    while len(descendants()) > 3 and time.monotonic() < deadline:
        pool.wait()
    assert len(descendants()) == 3


# function -> problem of its row, or its reward
OUTCOMES = {
    "sleeps": "timeout",
    "holds_the_lock": "timeout",
    "loops": "timeout",
    "ignores_signals": "timeout",
    "forks_for_ever": "error",
    "allocates": "error",
    "exits": "error",
    "exits_at_once": "killed",
    "kills_itself": "killed",
    "kills_its_parent": "error",
    "raises": "error",
    "raises_worse": "error",
    "gives_none": "none",
    "gives_text": "invalid",
    "gives_too_few": "invalid",
    "gives_numpys": 0.5,
    "gives_nan": "nan",
    "gives_infinity": "infinite",
    "gives_too_much": "infinite",
    "gives_a_boolean": 1.0,
    "gives_a_dict": "invalid",
    "takes_an_expression_that_backtracks": "timeout",
    "leaves_a_thread": 1.0,
    "leaves_a_process": "error",
    "imports_what_is_not_there": "error",
    "gives_a_coroutine_in_a_list": "invalid",
    "forgets_a_coroutine": "none",
    "writes_nonsense_to_the_pool": "killed",
    "closes_everything": "killed",
    "forges_a_result": "killed",
    "shuts_every_socket": "killed",
    "ends_by_a_real_time_signal": "killed",
    "writes_inside": 1.0,
}


@pytest.mark.parametrize("strict", [False, True], ids=["limits", "strict"])
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_hostile_function_ends_by_its_deadline_is_counted_and_leaves_nothing(name, strict):
    expected = OUTCOMES[name]
    timeout_s = TIMEOUT_S if expected == "timeout" else 10.0
    with opened(name, strict=strict, timeout_s=timeout_s) as pool:
        began = time.monotonic()
        (result,) = pool.run(columns(["text"]), 1)[name]
        took = time.monotonic() - began
        assert took < timeout_s + SLACK_S
        assert (result.problem or result.value) == expected, result.detail
        began = time.monotonic()
        pool.wait(timeout_s=REFILL_S)
        assert time.monotonic() - began < REFILL_S
        assert_small(pool)
    assert descendants() == []


def test_a_tensor_is_no_number():
    with opened("gives_a_tensor_on_the_graph", timeout_s=60.0) as pool:
        (result,) = pool.run(columns(["text"]), 1)["gives_a_tensor_on_the_graph"]
    assert (result.problem, result.detail) == ("invalid", "gave a Tensor; a reward is a number or None")


def test_a_gigabyte_of_output_is_cut_and_counted():
    with opened("prints", timeout_s=30.0) as pool:
        (result,) = pool.run(columns(["text"]), 1)["prints"]
        assert result.value == 1.0
        assert pool.output_bytes >= 1 << 30
        assert len(pool.output) <= 4000


def test_a_function_that_modifies_its_inputs_affects_no_other():
    given = columns(["a", "bb"], answer=["1", "2"])
    kept = {name: list(column) for name, column in given.items()}
    with opened("changes_its_inputs", "fine") as pool:
        found = pool.run(given, 2)
    assert given == kept
    assert [result.value for result in found["fine"]] == [1.0, 2.0]


@pytest.mark.parametrize("strict", [False, True], ids=["limits", "strict"])
def test_no_secret_of_the_environment_is_seen(strict, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    with opened("reads_secrets", strict=strict) as pool:
        (result,) = pool.run(columns(["text"]), 1)["reads_secrets"]
    assert result.value == 0.0


def test_a_variable_that_is_asked_for_is_seen(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    with opened("reads_secrets", env_vars=("WANDB_API_KEY",)) as pool:
        (result,) = pool.run(columns(["text"]), 1)["reads_secrets"]
    assert result.value == 1.0


@pytest.mark.parametrize("strict", [False, True], ids=["limits", "strict"])
def test_the_network_is_closed_in_the_strict_sandbox_alone(strict):
    with socket.create_server(("127.0.0.1", 0)) as server, opened("connects", strict=strict) as pool:
        (result,) = pool.run(columns([str(server.getsockname()[1])]), 1)["connects"]
    assert (result.problem or result.value) == ("error" if strict else 1.0)
    assert ("PermissionError" in result.detail) == strict


@pytest.mark.parametrize("strict", [False, True], ids=["limits", "strict"])
def test_files_outside_of_scratch_are_refused_in_both_sandboxes(strict, tmp_path):
    with opened("writes_outside", strict=strict) as pool:
        (result,) = pool.run(columns([str(tmp_path / "file")]), 1)["writes_outside"]
    assert result.problem == "error"
    assert "write below $TMPDIR" in result.detail
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("name", ["forks_for_ever", "forks_away", "leaves_a_process"])
@pytest.mark.parametrize("strict", [False, True], ids=["limits", "strict"])
def test_processes_are_bounded_and_go_with_their_row_where_they_are_allowed(name, strict):
    limits = Limits(memory_gb=2.0, processes=12)
    with opened(name, strict=strict, limits=limits) as pool:
        began = time.monotonic()
        (result,) = pool.run(columns(["text"]), 1)[name]
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        if name == "forks_for_ever":
            assert result.problem in {"killed", "timeout"}
        pool.wait(timeout_s=REFILL_S)
        assert_small(pool)
    assert descendants() == []


def test_a_process_with_thousands_of_open_files_has_a_pool():
    """The driver of a large cluster may have as many; `select.select` fails for descriptors from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("a process may open fewer than 2048 files here")
    with ExitStack() as stack:
        if soft != resource.RLIM_INFINITY and soft < 2048:
            resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        with opened("fine") as pool:
            found = pool.run(columns(["x", "y"]), 2)["fine"]
    assert problems(found) == {None: 2}


def test_one_bad_row_fails_alone():
    texts = ["fine"] * 20
    texts[7] = "hang"
    with opened("never_comes_back", rows_per_call=5) as pool:
        found = pool.run(columns(texts), 20)["never_comes_back"]
    assert [result.problem for result in found] == [None] * 7 + ["timeout"] + [None] * 12


@pytest.mark.parametrize("name", ["takes_turns", "takes_turns_in_a_batch"])
def test_async_calls_share_what_they_keep_at_module_level(name):
    target = f"tests.unit.rewards.samples:{name}"
    with opened(target, timeout_s=10.0, processes=1, rows_per_call=3) as pool:
        found = [pool.run(columns(["a", "bb", "ccc"] * 2), 6)[target] for _ in range(2)]
    assert [(result.value, result.detail) for results in found for result in results] == [(1, ""), (2, ""), (3, "")] * 4


def test_an_async_row_that_times_out_gives_back_what_it_held():
    target = "tests.unit.rewards.samples:times_out_in_turns"
    with opened(target, processes=1, rows_per_call=1) as pool:
        found = pool.run(columns(["fine", "slow", "fine"]), 3)[target]
    assert [result.problem for result in found] == [None, "timeout", None]


def test_no_task_thread_or_context_of_an_async_call_outlives_it():
    target = "tests.unit.rewards.samples:leaves_tasks_and_threads"
    with opened(target, timeout_s=10.0, processes=1, rows_per_call=1) as pool:
        found = pool.run(columns(["a"] * 3), 3)[target]
    assert [(result.value, result.detail) for result in found] == [(100, ""), (102, ""), (104, "")]


def test_a_batch_that_fails_too_often_is_abandoned_and_every_row_has_a_result():
    with opened("sleeps", timeout_s=0.2, rows_per_call=4) as pool:
        began = time.monotonic()
        found = pool.run(columns(["x"] * 100), 100, max_failed_rows=3)["sleeps"]
        assert time.monotonic() - began < 10.0  # one after another, the rows take 20
    assert len(found) == 100
    assert problems(found[-1:]) == {"error": 1}
    assert 4 <= problems(found)["timeout"] <= 6


def test_a_batch_has_a_deadline():
    with opened("sleeps", timeout_s=60.0, batch_timeout_s=0.5) as pool:
        began = time.monotonic()
        found = pool.run(columns(["x"] * 9), 9)["sleeps"]
        assert time.monotonic() - began < 0.5 + SLACK_S
    assert problems(found) == {"timeout": 9}
    assert "reward.batch_timeout_s=0.5" in found[0].detail


def test_nothing_outlives_the_process_that_owns_the_pool(tmp_path):
    """A SIGKILL of the owner ends the supervisor, the workers and their descendants, and removes their files."""
    script = tmp_path / "owner.py"
    script.write_text(
        "import time\n"
        "from tests.unit.rewards.pool.test_pool import FunctionSpec, Limits, PoolSettings, RewardPool\n"
        "pool = RewardPool({'f': FunctionSpec('tests.unit.rewards.hostile:leaves_a_process', {}, 60.0),"
        " 'g': FunctionSpec('tests.unit.rewards.hostile:sleeps', {}, 60.0)},"
        " PoolSettings(limits=Limits(processes=8)))\n"
        "pool.run({'prompt': ['p'] * 2, 'completion': ['c'] * 2}, 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "TMPDIR": str(tmp_path)}
    owner = psutil.Popen([os.sys.executable, str(script)], env=environment)
    deadline = time.monotonic() + 30.0
    below = []
    while len(below) < 3 and time.monotonic() < deadline:
        below = owner.children(recursive=True)
    owner.kill()
    owner.wait()
    assert len(below) >= 3
    assert psutil.wait_procs(below, timeout=5.0)[1] == []
    deadline = time.monotonic() + 5.0
    while list(tmp_path.glob("rlpack-rewards-*")) and time.monotonic() < deadline:
        pass
    assert list(tmp_path.glob("rlpack-rewards-*")) == []

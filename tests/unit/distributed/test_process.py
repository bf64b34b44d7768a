import math
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.weight_layout import WeightForm
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import PlacementError, RankError, RoleError, Shortage, StoreFullError
from rlpack.distributed.process import RankProcess, load_class
from rlpack.role_call import call_began
from rlpack.worker import Worker
from rlpack.workers.reward import RewardWorker
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer


class Teller(Worker):
    def tell(self, text: str) -> BatchedDataDict:
        return BatchedDataDict({"text": [text, text]}, row_ids=[5, 3])

    def count(self) -> int:
        return 2

    def anonymous(self) -> BatchedDataDict:
        return BatchedDataDict({"rewards": torch.zeros(2)})


class VerdictError(Exception):
    """Is pickled by its text alone, and so can't be read again."""

    def __init__(self, judge: str, verdict: str) -> None:
        super().__init__(f"{judge} says {verdict}")


class MuteError(Exception):
    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise TypeError("no words")


class Raiser(Worker):
    def verdict(self) -> None:
        raise VerdictError("the judge", "no")

    def mute(self) -> None:
        raise MuteError

    def plain(self) -> None:
        raise KeyError("plain")


class Waiter(Worker):
    """Returns rows once it may."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.begun, self.may_end, self.calls = threading.Event(), threading.Event(), 0

    @classmethod
    def from_settings(cls, context: RankContext, *settings: Any) -> "Waiter":
        return cls(context)

    def tell(self) -> BatchedDataDict:
        self.calls += 1
        self.begun.set()
        assert self.may_end.wait(30)
        return BatchedDataDict({"text": ["a", "b"]}, row_ids=[1, 0])


class Overlapping(Worker):
    """Counts how many of its calls run at the same time; each waits until a number of calls do, or a deadline."""

    def __init__(self, context: RankContext, awaited: int, wait_s: float) -> None:
        super().__init__(context)
        self.awaited, self.wait_s, self.changed = awaited, wait_s, threading.Condition()
        self.started: list[int] = []
        self.running = self.most = 0

    def tell(self, number: int) -> BatchedDataDict:
        with self.changed:
            self.started.append(number)
            self.running += 1
            self.most = max(self.most, self.running)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.awaited, self.wait_s)
            self.running -= 1
        return BatchedDataDict({"text": [str(number)]}, row_ids=[0])


class Namer(Worker):
    def names(self, number: int, *, role: str, method: str) -> tuple[int, str, str]:
        return number, role, method


class Clock(Worker):
    began_before: float | None = None

    def began(self) -> tuple[float | None, float | None]:
        return self.began_before, call_began()

    def rows(self) -> BatchedDataDict:
        self.began_before = call_began()
        return BatchedDataDict({"rewards": torch.zeros(2)}, row_ids=[0, 1])


@pytest.fixture
def process() -> Iterator[RankProcess]:
    """Return the only rank of a pool, its process group made."""
    threads = torch.get_num_threads()
    process = RankProcess(RankContext(), threads=1)
    address = process.rendezvous("127.0.0.1", 10.0)
    process.join(address, "127.0.0.1", 10.0)
    yield process
    process.close()
    torch.set_num_threads(threads)


def test_a_host_runs_roles_in_one_process_group(process: RankProcess):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo_one_thread")
    settings: tuple[Any, ...] = (tiny_config(), tiny_tokenizer())
    process.start_role("actor", "rlpack.workers.actor:ActorWorker", settings)
    process.start_role("reward", "rlpack.workers.reward:RewardWorker", settings)
    batch = tiny_rollouts([(2, 3), (1, 4)]).keep(["input_ids", "response_mask"])
    (shard,) = batch.shard_by_batch_size(1, sequence_packing={"max_tokens": 16})
    found = batch.restore([process.call("actor", "logprobs", {}, shard)])
    assert found["logprobs"].lengths.tolist() == [5, 5]
    assert (found["logprobs"].values[batch["response_mask"].values] < 0).all()
    layout = process.call("actor", "open_weights", {}, WeightForm(torch.float32))
    assert len(layout) == 1
    assert layout.shapes["lm_head.weight"] == (len(tiny_tokenizer()), 32)
    bucket = process.call("actor", "export_bucket", {}, 0, WeightForm(torch.float32), 1)
    assert bucket.arrays.keys() == layout.shapes.keys()
    assert str(bucket.header) == "bucket 1 of 1 of policy version 1"


def test_closing_leaves_the_process_group_and_can_be_repeated(process: RankProcess):
    process.close()
    process.close()
    assert not dist.is_initialized()


def test_an_address_that_no_interface_has_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    process = RankProcess(RankContext(), threads=torch.get_num_threads())
    with pytest.raises(RuntimeError, match=r"no network interface has this node's address 203\.0\.113\.9; set GLOO"):
        process.join(("203.0.113.9", 1), "203.0.113.9", 1.0)


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("", r"no network interface has this node's address 203\.0\.113\.9; set GLOO_SOCKET_IFNAME"),
        ("none0", r"GLOO_SOCKET_IFNAME is 'none0', which has no IP address on this node; its interfaces are .*lo"),
    ],
)
def test_a_rendezvous_without_an_address_of_its_node_is_an_error(
    monkeypatch: pytest.MonkeyPatch, interface: str, message: str
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    process = RankProcess(RankContext(), threads=torch.get_num_threads())
    with pytest.raises(RuntimeError, match=message):
        process.rendezvous("203.0.113.9", 1.0)


def test_the_interface_that_is_named_is_used_where_none_has_the_nodes_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    process = RankProcess(RankContext(), threads=torch.get_num_threads())
    address = process.rendezvous("203.0.113.9", 10.0)
    assert address[0] == "127.0.0.1"
    process.join(address, "203.0.113.9", 10.0)
    try:
        assert dist.is_initialized()
    finally:
        process.close()


def test_a_target_is_loaded_by_its_text():
    assert load_class("rlpack.workers.reward:RewardWorker") is RewardWorker


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("rlpack.workers.reward", r"'rlpack\.workers\.reward' is not of the form package\.module:Class"),
        ("rlpack.workers.reward.RewardWorker", "is not of the form"),
        (":RewardWorker", "is not of the form"),
        ("rlpack.workers.reward:", "is not of the form"),
        ("no_such_package:Judge", r"No module named 'no_such_package'; is the package installed on every node\?"),
        ("rlpack.workers.no_such:Judge", r"No module named 'rlpack\.workers\.no_such'"),
        ("rlpack.workers.reward:Judge", r"rlpack\.workers\.reward has no class Judge; it has .*RewardWorker"),
        ("rlpack.workers.reward:targets_of", "rlpack.workers.reward has no class targets_of"),
    ],
)
def test_a_target_that_gives_no_class_is_named_with_what_went_wrong(target: str, message: str):
    with pytest.raises(PlacementError, match=message):
        load_class(target)


def test_a_target_whose_module_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "half_a_judge.py").write_text("import a_missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        r"'half_a_judge:Judge': half_a_judge can't be imported: ModuleNotFoundError: No module named "
        r"'a_missing_dependency' \(.*/half_a_judge\.py, line 1\)"
    )
    with pytest.raises(PlacementError, match=message):
        load_class("half_a_judge:Judge")
    assert "half_a_judge" not in sys.modules


def test_a_target_whose_module_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wrong_judge.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlacementError, match=r"wrong_judge can't be imported: ZeroDivisionError: division by zero"):
        load_class("wrong_judge:Judge")
    (tmp_path / "leaving_judge.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(PlacementError, match=r"leaving_judge can't be imported: SystemExit: 0"):
        load_class("leaving_judge:Judge")


def test_a_role_error_reads_as_one_line_and_survives_pickling():
    error = pickle.loads(pickle.dumps(RoleError("judge", 1, "score", "ValueError: no")))
    assert str(error) == "role judge, rank 1, in score: ValueError: no"
    assert str(RoleError("judge", None, "start", "late")) == "role judge, some rank, in start: late"
    error.phase, error.step = "train", 7
    assert str(pickle.loads(pickle.dumps(error))) == "role judge, rank 1, in score, step 7 of train: ValueError: no"


@pytest.mark.parametrize(
    ("method", "text"),
    [("verdict", "VerdictError: the judge says no"), ("mute", "MuteError: (its text is unavailable: TypeError)")],
)
def test_an_exception_that_cannot_be_sent_comes_as_one_that_says_the_same(process: RankProcess, method: str, text: str):
    process.start_role("raiser", f"{__name__}:Raiser", (tiny_config(), tiny_tokenizer()))
    for call in (lambda: process.call("raiser", method, {}), lambda: process.call_rows(1, "raiser", method, {})):
        with pytest.raises(RankError) as failure:
            call()
        error = pickle.loads(pickle.dumps(failure.value))
        assert str(error) == text
        assert f"in {method}\n" in error.traceback
    with pytest.raises(KeyError, match="plain"):
        process.call("raiser", "plain", {})


def test_errors_of_the_driver_and_of_the_store_name_no_rank():
    assert str(RoleError("driver", None, "take", "late")) == "the driver, in take: late"
    error = pickle.loads(pickle.dumps(StoreFullError("actor", "logprobs", 12_345, Shortage(345, 0, 12_000))))
    assert str(error).startswith(
        "role actor, in logprobs: 12.3 kB of tokens and texts exceed the free room in the object store by 345 bytes: "
        "0 bytes of the 12 kB for batches are in use; lower trainer.prompts_per_step"
    )


def test_keyword_arguments_of_any_name_reach_the_role(process: RankProcess):
    process.start_role("namer", "tests.unit.distributed.test_process:Namer", (tiny_config(), tiny_tokenizer()))
    assert process.call("namer", "names", {"role": "a", "method": "b"}, 1) == (1, "a", "b")


def test_a_role_knows_when_its_call_began(process: RankProcess):
    process.start_role("clock", "tests.unit.distributed.test_process:Clock", (tiny_config(), tiny_tokenizer()))
    before = time.monotonic()
    process.call_rows(1, "clock", "rows", {})
    first, second = process.call("clock", "began", {})
    assert before <= first <= second <= time.monotonic()
    assert call_began() is None


def test_what_several_calls_hold_back_is_told_apart_and_handed_over_once(process: RankProcess):
    process.start_role("teller", f"{__name__}:Teller", (tiny_config(), tiny_tokenizer()))
    found = {
        call_id: process.call_rows(call_id, "teller", "tell", {}, text) for call_id, text in ((7, "one"), (8, "two"))
    }
    assert found[7].stub.row_ids.tolist() == [5, 3]
    assert found[7].sizes == found[8].sizes
    assert [process.pop_columns(call_id) for call_id in (7, 8)] == [
        [{"text": ["one", "one"]}],
        [{"text": ["two", "two"]}],
    ]
    process.call_rows(9, "teller", "tell", {}, "three")
    process.discard(9)
    with pytest.raises(KeyError):
        process.pop_columns(9)


def test_a_background_call_that_is_discarded_is_canceled_or_drops_its_rows_at_its_end(process: RankProcess):
    process.start_role("waiter", f"{__name__}:Waiter", (tiny_config(), tiny_tokenizer()))
    waiter = process._roles["waiter"]
    for call_id in (1, 2):
        process.submit(call_id, "waiter", "tell", {})
    assert waiter.begun.wait(30)
    running = process._background[1]
    for call_id in (1, 2):
        process.discard(call_id)
    waiter.may_end.set()
    assert len(running.result(30).sizes) == 1  # of a column that the rank keeps
    process._threads["waiter"].shutdown()
    assert (waiter.calls, process._columns, process._background) == (1, {}, {})


@pytest.mark.parametrize("derives_from_worker", [True, False])
def test_background_calls_of_a_role_run_one_at_a_time_and_in_order(process: RankProcess, derives_from_worker: bool):
    worker = Overlapping(RankContext(), awaited=2, wait_s=0.02)
    process._roles["judge"] = worker if derives_from_worker else SimpleNamespace(tell=worker.tell)
    for call_id in range(6):
        process.submit(call_id, "judge", "tell", {}, call_id)
    for call_id in range(6):
        assert process.result(call_id, 30) is not None
    assert (worker.started, worker.most) == ([*range(6)], 1)


def test_a_role_says_how_many_of_its_background_calls_run_at_a_time(process: RankProcess):
    worker = Overlapping(RankContext(), awaited=3, wait_s=10.0)
    worker.background_threads = 3
    process._roles["judge"] = worker
    for call_id in range(6):
        process.submit(call_id, "judge", "tell", {}, call_id)
    for call_id in range(6):
        assert process.result(call_id, 30) is not None
        assert process.pop_columns(call_id) == [{"text": [str(call_id)]}]
    assert (sorted(worker.started), worker.most) == ([*range(6)], 3)


def test_a_background_call_that_waits_says_when_the_last_one_of_its_role_ended(process: RankProcess):
    process.start_role("waiter", f"{__name__}:Waiter", (tiny_config(), tiny_tokenizer()))
    waiter = process._roles["waiter"]
    process.submit(1, "waiter", "tell", {})
    assert process.result(1, 0.0) == math.inf
    waiter.may_end.set()
    assert not isinstance(process.result(1, 30), float)
    waiter.may_end.clear()
    process.submit(2, "waiter", "tell", {})
    time.sleep(0.05)
    since = process.result(2, 0.0)
    assert isinstance(since, float)
    assert 0.05 <= since < 30
    waiter.may_end.set()


@pytest.mark.parametrize("number", [0, -1, 2.0, "4", None, True])
def test_a_wrong_number_of_background_threads_is_named_as_the_role_is_built(
    process: RankProcess, monkeypatch: pytest.MonkeyPatch, number: Any
):
    monkeypatch.setattr(Teller, "background_threads", number, raising=False)
    with pytest.raises(
        PlacementError, match=r"Teller\.background_threads is .*; set it to a whole number of at least 1"
    ):
        process.start_role("teller", f"{__name__}:Teller", (tiny_config(), tiny_tokenizer()))


def test_a_method_that_is_to_return_rows_says_so(process: RankProcess):
    process.start_role("teller", f"{__name__}:Teller", (tiny_config(), tiny_tokenizer()))
    with pytest.raises(DataError, match=r"Teller.count returned a int; a method under @sharded\(\) returns"):
        process.call_rows(1, "teller", "count", {})
    with pytest.raises(DataError, match=r"Teller.anonymous returned rows without ids.*row_ids=shard.row_ids"):
        process.call_rows(1, "teller", "anonymous", {})


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(0), GeneratorExit()])
def test_what_would_end_a_rank_is_an_error_of_the_call(raised):
    class Leaving:
        def score(self):
            raise raised

    process = RankProcess(RankContext(), threads=torch.get_num_threads())
    process._roles["judge"] = Leaving()
    with pytest.raises(RankError) as caught:
        process.call("judge", "score", {})
    assert str(caught.value) == type(raised).__name__ + (": 0" if isinstance(raised, SystemExit) else "")
    assert "in score" in caught.value.traceback


def test_ray_can_end_a_rank():
    class Terminated:
        def score(self):
            error = SystemExit(1)
            error.ray_terminate_msg = "the node is drained"
            raise error

    process = RankProcess(RankContext(), threads=torch.get_num_threads())
    process._roles["judge"] = Terminated()
    with pytest.raises(SystemExit):
        process.call("judge", "score", {})

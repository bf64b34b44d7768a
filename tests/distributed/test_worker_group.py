import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from rlpack.config.schema import Rollout
from rlpack.data.tokenization import eos_id
from rlpack.distributed import restartable_pool
from rlpack.distributed.answers import Answer, arrived
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import RoleError
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.weights import WeightChannel
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver.reward_stages import PendingRewards
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, sample_responses
from rlpack.rollout.canary import canary_tokens
from rlpack.rollout.types import SamplingParams
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import SFTLoss
from rlpack.workers.reward import RewardWorker
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_rollouts, tiny_tokenizer
from tests.distributed.roles import Echo, Faulty
from tests.unit.recipes.driver.sessions import session_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]
EXTRA_POOLS = ("explodes", "explodes_first", "hangs_first", "loses_touch", "dies", "exports", "lost")

Groups = dict[str, WorkerGroup[Any]]

UNEVEN = [(3, 9), (5, 1), (4, 0), (2, 16), (7, 6), (3, 8), (1, 4)]
MODES = ("packed", "dynamic", "fixed")


# Far more than an error takes to come, and far less than `call_timeout_s`, at which a failure that is missed would end.
PROMPT_S = 60.0


def ends(group: WorkerGroup[Any], rank: int) -> bool:
    """Whether the rank's process ends; Ray kills processes without waiting for them."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            ray.get(group.ranks._pool.actors[rank].node_ip.remote(), timeout=10)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayActorError:
            return True
    return False


@contextmanager
def prompt_failure() -> Iterator[pytest.ExceptionInfo[RoleError]]:
    """Expect an error that does not wait for the deadline of the call."""
    started = time.monotonic()
    with pytest.raises(RoleError) as failure:
        yield failure
    assert time.monotonic() - started < PROMPT_S


def test_ranks_have_the_priority_of_the_driver(cluster: Cluster, groups: Groups):
    # Ray by itself runs its workers at nice 15.
    pids = cluster.open_pools([])["main"].process_ids()
    assert len(pids) == 2
    assert {psutil.Process(pid).nice() for pid in pids} == {psutil.Process().nice()}


def test_a_broadcast_call_runs_on_all_ranks_of_one_process_group(groups: Groups):
    assert groups["packed"].run(Echo.add_up, 2.0, scale=10.0) == 20.0 + 40.0


def test_collectives_of_two_threads_run_in_one_order_on_all_ranks(groups: Groups):
    def sums(value: float) -> list[float]:
        return [groups["packed"].run(Echo.add_up, value + number) for number in range(30)]

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(sums, (0.0, 1000.0))
    # Rank 0 adds the value once, rank 1 twice.
    assert one == [3.0 * number for number in range(30)]
    assert other == [3000.0 + 3.0 * number for number in range(30)]


def test_a_rank_zero_call_runs_on_rank_zero_alone(groups: Groups):
    assert groups["packed"].run(Echo.place) == ("main", 0, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [7, 1, 0])
def test_rows_come_back_in_the_order_they_were_given(groups: Groups, store: RayStore, mode: str, rows: int):
    batch = tiny_rollouts(UNEVEN[:rows])
    found = store.fetch(groups[mode].run(Echo.times, batch.keep(["input_ids", "uid"]), 3))
    assert torch.equal(found["times"].values, batch["input_ids"].values * 3)
    assert torch.equal(found["times"].lengths, batch["input_ids"].lengths)
    assert found["uid"] == batch["uid"]
    assert set(found["rank"].tolist()) == set(range(min(rows, 2)))


def test_results_of_roles_that_batch_differently_belong_to_the_same_rows(groups: Groups, store: RayStore):
    batch = tiny_rollouts(UNEVEN).select([4, 6, 0, 2, 5, 1, 3])
    given = batch.keep(["input_ids", "uid"])
    collected = given
    for factor, mode in enumerate(MODES, start=2):
        found = store.fetch(groups[mode].run(Echo.times, given, factor))
        collected = collected.union({mode: found["times"]})
    for factor, mode in enumerate(MODES, start=2):
        assert torch.equal(collected[mode].values, given["input_ids"].values * factor)


def test_a_merged_call_returns_what_its_merge_makes_of_the_ranks(groups: Groups):
    group, batch = groups["fixed"], tiny_rollouts(UNEVEN).keep(["input_ids"])
    assert group.run(Echo.count_rows, batch) == 7
    assert group.run(Echo.count_steps, batch) == 2 * 1
    by_three = WorkerGroup("fixed", group.ranks, group.batching, mini_batch_size=3)
    assert by_three.run(Echo.count_steps, batch) == 2 * 3
    assert by_three.run(Echo.count_rows, batch) == 7


def test_a_users_own_role_scores_beside_the_built_in_reward(groups: Groups):
    tokens = tiny_rollouts([(2, 1), (2, 2), (2, 1)]).keep(["input_ids", "response_mask"])
    texts = tokens.union(
        {"prompt": ["1+1=", "2+2=", "3+3="], "completion": ["#2", "that is #5", ""], "answer": ["2", "4", "6"]}
    )
    judged = groups["judge"].run(RewardWorker.score, texts)
    assert judged["rewards"].tolist() == pytest.approx([2 / 256, 10 / 256, 0.0])
    assert groups["reward"].run(RewardWorker.score, texts)["rewards"].tolist() == [1.0, 0.0, 0.0]


def test_the_sampler_agrees_with_the_trainer_once_it_has_its_weights(groups: Groups, store: RayStore):
    tokenizer = tiny_tokenizer()
    prompts = tiny_rollouts([(3, 0), (5, 0), (2, 0)]).keep(["input_ids", "group_ids", "uid"])
    prompts = prompts.union({"seeds": torch.tensor([11, 12, 13])})
    lesson = tiny_rollouts(UNEVEN).keep(["input_ids", "response_mask"])
    share = torch.full((lesson.num_rows,), 1 / lesson["response_mask"].values.sum())
    lesson = lesson.union({"loss_weight": share, "token_weight": share})
    groups["actor"].run(ActorWorker.train_step, lesson, SFTLoss(), 0.05)
    params = SamplingParams(max_new_tokens=12, stop_token_ids=(eos_id(tokenizer),))

    def gap() -> float:
        made = groups["rollout"].run(RolloutWorker.generate, prompts, params)
        own = groups["actor"].run(ActorWorker.logprobs, made.keep(["input_ids", "response_mask", "rollout_logprobs"]))
        sampled, trained = (store.fetch(batch) for batch in (made.keep(["rollout_logprobs"]), own))
        gap = (trained["logprobs"].values - sampled["rollout_logprobs"].values).abs()
        assert own["logprob_gap"].sum().item() == pytest.approx(gap.sum().item())
        return gap.max().item()

    assert gap() > 0.1
    canary_gap = WeightChannel(groups["actor"], groups["rollout"]).publish(canary_tokens(len(tokenizer)))
    assert canary_gap < 1e-4
    assert gap() < 1e-4


def test_a_method_that_does_not_say_how_it_is_called_is_refused(groups: Groups):
    with pytest.raises(TypeError, match=r"Echo\.undecorated has no dispatch decorator"):
        groups["packed"].run(Echo.undecorated)


def test_an_exception_on_one_rank_is_one_error_and_ends_the_pool(groups: Groups):
    group = groups["explodes"]
    with prompt_failure() as failure:
        group.run(Faulty.explode, 1)
    message, _, place = str(failure.value).partition(" (")
    assert message == "role explodes, rank 1, in explode: ValueError: the judge has left the building"
    assert re.fullmatch(r"/.*/tests/distributed/roles\.py, line \d+\)", place)
    assert all(ends(group, rank) for rank in range(2))
    assert groups["packed"].run(Echo.place)[1] == 0


def test_a_process_that_is_killed_is_one_error_and_ends_the_pool(groups: Groups):
    group = groups["dies"]
    group.submit(Faulty.hang_in_background, tiny_rollouts(UNEVEN))
    with prompt_failure() as failure:
        group.run(Faulty.die, 1)
    assert (failure.value.role, failure.value.rank, failure.value.method) == ("dies", 1, "die")
    assert "the process died" in failure.value.cause
    assert failure.value.cause.endswith(
        "; under way in the background: dies.hang_in_background"
    )  # which may have taken the memory
    assert all(ends(group, rank) for rank in range(2))


def test_a_failure_names_the_earlier_call_in_which_another_rank_still_is(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
):
    def last_first(refs: list[ray.ObjectRef], deadline: float) -> list[Answer]:
        """Return the failure before rank 0's answer to the earlier call, as may happen when both arrive at once."""
        time.sleep(0.5)
        return arrived(refs[::-1], deadline)

    monkeypatch.setattr(restartable_pool, "arrived", last_first)
    group = groups["loses_touch"]
    group.submit(Faulty.hang_over_rows_of, tiny_rollouts(UNEVEN), 1)
    with prompt_failure() as failure:
        group.run(Faulty.lose_touch)
    assert str(failure.value).startswith("role loses_touch, rank 0, in lose_touch: RuntimeError: connection closed")
    assert str(failure.value).endswith(
        "; rank 1 had not answered loses_touch.hang_over_rows_of before, which may be why"
    )


def test_a_call_may_run_beside_others_of_its_processes(groups: Groups, store: RayStore):
    batch, echo = tiny_rollouts(UNEVEN), groups["dynamic"]
    pending = echo.submit(Echo.answer_once_released, batch)
    assert echo.run(Echo.release)  # answered while the first call is under way
    assert torch.equal(store.fetch(pending.result())["times"].values, 3 * batch["input_ids"].values)


def test_a_rank_answers_other_calls_while_the_driver_waits_for_one_beside_them(groups: Groups, store: RayStore):
    batch, echo = tiny_rollouts(UNEVEN), groups["packed"]
    pending = echo.submit(Echo.answer_once_released, batch)
    with ThreadPoolExecutor(1) as driver:
        waiting = driver.submit(pending.result)
        time.sleep(0.5)
        rows = batch.keep(["input_ids", "uid"])
        assert echo.submit_to(0, Echo.hand_back, rows, answer_s=5.0).result().num_rows == len(UNEVEN)
        assert not waiting.done()
        assert echo.run(Echo.release)
        assert torch.equal(store.fetch(waiting.result())["times"].values, 3 * batch["input_ids"].values)


def test_the_deadline_of_a_single_call_counts_from_the_end_of_the_call_before_it(groups: Groups):
    rows, echo = tiny_rollouts(UNEVEN).keep(["input_ids", "uid"]), groups["dynamic"]
    before = echo.submit_to(0, Echo.hand_back_late, rows, 4.0)
    assert echo.submit_to(0, Echo.hand_back, rows, answer_s=2.0).result().num_rows == len(UNEVEN)
    assert before.result().num_rows == len(UNEVEN)


def test_it_counts_from_there_if_another_thread_waits_for_the_call_before_it(groups: Groups):
    rows, echo = tiny_rollouts(UNEVEN).keep(["input_ids", "uid"]), groups["dynamic"]
    before = echo.submit_to(0, Echo.hand_back_late, rows, 4.0)
    with ThreadPoolExecutor(1) as other:
        awaited = other.submit(before.result)
        time.sleep(0.5)
        assert echo.submit_to(0, Echo.hand_back, rows, answer_s=2.0).result().num_rows == len(UNEVEN)
        assert awaited.result().num_rows == len(UNEVEN)


def test_tokens_of_a_single_call_are_stored_after_a_call_that_came_in_between(groups: Groups, store: RayStore):
    rows, echo = tiny_rollouts(UNEVEN).keep(["input_ids"]), groups["dynamic"]
    answered = echo.submit_to(0, Echo.hand_back_tokens, rows, answer_s=2.0)
    ray.wait(list(answered.answers), timeout=60)
    between = echo.submit_to(0, Echo.hand_back_late, tiny_rollouts(UNEVEN).keep(["uid"]), 4.0)
    assert torch.equal(store.fetch(answered.result())["input_ids"].values, rows["input_ids"].values)
    assert between.result().num_rows == len(UNEVEN)


def test_the_deadline_of_a_call_beside_others_counts_from_the_end_of_its_roles_last(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(groups["fixed"].ranks, "_call_s", 6.0)
    rows = tiny_rollouts(UNEVEN[:2]).keep(["uid"])
    pending = [groups["fixed"].submit(Echo.sleep_in_background, rows, 4.0) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert [rows.num_rows for rows in threads.map(lambda one: one.result(), pending)] == [2, 2, 2]


def test_what_is_not_marked_runs_before_later_calls_whether_or_not_it_is_waited_for(groups: Groups):
    batch = tiny_rollouts(UNEVEN)
    pending = groups["packed"].submit(Echo.note_rows, batch)
    assert sum(groups["packed"].run(Echo.read_noted)) == len(UNEVEN)
    assert pending.result().num_rows == len(UNEVEN)


def test_a_roles_own_calls_beside_others_come_one_after_the_other(groups: Groups):
    batch = tiny_rollouts(UNEVEN)
    pending = [groups["fixed"].submit(Echo.overlaps, batch) for _ in range(2)]
    assert not any(found["overlaps"].any() for found in [one.result() for one in pending])


def test_a_call_that_failed_ends_later_ones_of_its_processes_which_wait_for_one_that_has_left_it(groups: Groups):
    group = groups["explodes_first"]
    pending = group.submit(Faulty.explode_over_rows, tiny_rollouts(UNEVEN))
    with prompt_failure() as failure:
        group.run(Faulty.wait_for_all)
    message = "role explodes_first, rank 1, in explode_over_rows: ValueError: the judge has left the building"
    assert str(failure.value).startswith(message)
    with pytest.raises(RoleError, match="explode_over_rows"):
        pending.result()


def test_a_call_that_hangs_is_named_by_the_later_one_that_waits_behind_it(groups: Groups):
    group = groups["hangs_first"]
    group.ranks._call_s = 2.0
    group.submit(Faulty.hang_over_rows, tiny_rollouts(UNEVEN))
    with prompt_failure() as failure:
        group.run(Faulty.wait_for_all)
    message = "role hangs_first, rank 0, in hang_over_rows: no answer from rank 0 within 2 s"
    assert str(failure.value).startswith(message)


def test_a_call_that_hangs_is_named_though_later_ones_were_submitted_meanwhile(groups: Groups):
    group = groups["exports"]
    group.ranks._call_s = 2.0
    pending = group.submit(Faulty.hang_over_rows, tiny_rollouts(UNEVEN))
    group.submit(Faulty.wait_for_all)
    with prompt_failure() as failure:
        pending.result()
    message = "role exports, rank 0, in hang_over_rows: no answer from ranks 0, 1 within 2 s"
    assert str(failure.value).startswith(message)


def test_calls_that_nobody_waits_for_can_be_discarded(groups: Groups, store: RayStore):
    batch, echo = tiny_rollouts(UNEVEN), groups["packed"]
    before, in_flight = sum(echo.run(Echo.read_noted)), store.in_flight
    echo.submit(Echo.times, batch, 3)
    echo.submit(Echo.overlaps, batch)
    echo.submit(Echo.note_rows, batch)
    assert groups["fixed"].discard_submitted() == ["packed.times", "packed.overlaps", "packed.note_rows"]
    assert echo.discard_submitted() == []
    assert (sum(echo.run(Echo.read_noted)), store.in_flight) == (before + len(UNEVEN), in_flight)


def test_a_part_of_the_responses_is_scored_while_the_next_is_generated(groups: Groups, store: RayStore, tmp_path: Path):
    session = session_of(tmp_path, rollout=Rollout(max_num_seqs=2))
    session.groups["rollout"] = groups["sampler"]
    prompts = tiny_rollouts([(3, 0), (5, 0), (2, 0), (4, 0), (1, 0)]).keep(["input_ids", "uid"])
    pending, draw = PendingRewards([groups["listener"]]), DrawnPrompts(prompts, 1, np.arange(5))
    with store.lease("a step"):
        rollouts = sample_responses(session, draw, 2, temperature=1.0, metrics={}, on_part=pending.submit)
        rewards, valid, _, _ = pending.result()
    assert rollouts["uid"] == [uid for uid in prompts["uid"] for _ in range(2)]
    assert (rewards.tolist(), valid.all()) == ([1.0] * 10, True)


def test_a_failure_beside_other_calls_is_said_when_it_is_waited_for(groups: Groups):
    pending = groups["lost"].submit(Echo.break_in_background, tiny_rollouts(UNEVEN))
    with pytest.raises(RoleError, match=r"role lost, rank \d, in break_in_background: ValueError: a call in the back"):
        pending.result()


def test_calls_that_return_no_rows_can_be_waited_for_later_and_run_in_the_order_they_were_submitted(groups: Groups):
    group = groups["packed"]
    before = sum(group.run(Echo.read_noted))
    noted = group.submit(Echo.note_rows, tiny_rollouts(UNEVEN))
    total = group.submit(Echo.read_noted)
    counted, place = group.submit(Echo.count_rows, tiny_rollouts(UNEVEN)), group.submit(Echo.place)
    assert (place.result(), counted.result()) == (("main", 0, 2), len(UNEVEN))
    assert (sum(total.result()), noted.result().num_rows) == (before + len(UNEVEN), len(UNEVEN))

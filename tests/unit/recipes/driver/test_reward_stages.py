"""The driver combines the rewards of scoring roles; with processes: tests/distributed/test_worker_group.py."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.config.schema import Trainer
from rlpack.distributed.calls import Pending
from rlpack.distributed.errors import RoleError
from rlpack.distributed.usage import Usage
from rlpack.models.flops import ModelFlops
from rlpack.packing import Batching, Cost
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch
from rlpack.recipes.driver.performance import PerformanceMeter
from rlpack.recipes.driver.reward_stages import PendingRewards, collect_rewards
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import AnsweringGroup, run_of, session_of, set_group


def scored_by(session: Session, *parts: BatchedDataDict, step: StepContext | None = None) -> BatchedDataDict:
    """Return the rows of all parts with the rewards of the session's scoring roles."""
    pending = PendingRewards(session.scorers)
    for part in parts:
        pending.submit(part)
    step = session.begin_step(1) if step is None else step
    return collect_rewards(session, step, BatchedDataDict.concat(parts), pending)


def test_custom_roles_get_tokens_and_rows_that_their_batching_drops_are_not_scored(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9)]).union({"completion": ["a", "b"]})

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        assert {"input_ids", "response_mask", "completion"} <= set(batch)
        zeros = torch.zeros(2)
        return batch.keep([]).union({"rewards": zeros + 1, "quarantined": zeros > 0})

    set_group(session, "reward", score=score)
    set_group(session, "judge", Batching(max_tokens=8, overlong="drop"), score=score)
    pending = PendingRewards(session.scorers)
    pending.submit(rollouts)
    rewards, valid, _, _ = pending.result()
    assert (rewards.tolist(), valid.tolist()) == ([2.0, 0.0], [True, False])


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            {"praise": torch.zeros(2)},
            r"role judge, some rank, in score: it adds a column 'praise', the name of .* rename the column",
        ),
        ({"advantages": torch.zeros(2)}, "it adds a column 'advantages'"),  # which a later stage will add
        (
            {"level": [1, 2]},
            "it returned a column 'level', the name of a column of the dataset or the recipe, which its shard has",
        ),  # which the dataset has
        ({"baseline": torch.zeros(2)}, "it adds a column 'baseline'"),  # a key of algorithm
    ],
)
def test_a_column_that_is_there_already_is_refused_by_the_role_that_adds_it(
    tmp_path: Path, added: dict[str, Any], message: str
):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9)]).union({"level": [1, 2]})
    scored = {"rewards": torch.ones(2), "quarantined": torch.zeros(2, dtype=torch.bool)}
    set_group(session, "reward", score=rollouts.keep([]).union(scored | {"praise": torch.ones(2)}))
    set_group(session, "judge", score=rollouts.keep([]).union(scored))
    assert scored_by(session, rollouts)["praise"].tolist() == [1, 1]
    set_group(session, "judge", score=rollouts.keep([]).union(scored | added))
    with pytest.raises(RoleError, match=message):
        scored_by(session, rollouts)


def test_counts_of_scoring_roles_are_summed_over_roles_and_over_the_calls_of_a_step(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2)]).union({"completion": [*"abc"]})

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        zeros = torch.zeros(3)
        failures = torch.tensor([0, 1, 4])  # a row that was late, one without a number
        part = torch.tensor([0.5, torch.nan, 1.0])
        counts = {"quarantined": failures > 0, "reward_failure": failures}
        return batch.keep([]).union({"rewards": zeros + 1, "reward_style": part, "reward_none": zeros / 0, **counts})

    def judge(batch: BatchedDataDict) -> BatchedDataDict:
        zeros = torch.zeros(3)
        failures = torch.tensor([0, 1, 0])
        counts = {"reward_failure": failures, "reward_retries": torch.tensor([5, 0, 0])}
        return batch.keep([]).union({"rewards": zeros, "quarantined": zeros > 0, **counts})

    set_group(session, "reward", score=score)
    set_group(session, "judge", score=judge)
    step = session.begin_step(1)
    scored = scored_by(session, rollouts, step=step)
    scored_by(session, rollouts, step=step)
    assert "reward_failure" not in scored
    assert scored["reward_style"][0] == 0.5
    counts = {name: step.metrics[f"reward/{name}"] for name in ("timeouts", "errors", "invalid", "retries")}
    assert counts == {"timeouts": 4.0, "errors": 0.0, "invalid": 2.0, "retries": 10.0}
    assert step.metrics["reward/functions/style"] == 0.75
    assert "reward/functions/none" not in step.metrics
    assert scored["rewards_of_reward"].nan_to_num(-1.0).tolist() == [1.0, -1.0, -1.0]
    assert (step.metrics["reward/roles/reward"], step.metrics["reward/roles/judge"]) == (1.0, 0.0)
    assert step.metrics["reward/quarantined"] == 2


def lengths_as_rewards(batch: BatchedDataDict) -> BatchedDataDict:
    lengths = batch["input_ids"].lengths
    return batch.keep([]).union({"rewards": lengths.float(), "quarantined": lengths == 5, "length": lengths})


def test_a_batch_that_is_scored_in_parts_has_the_rewards_of_the_whole(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2), (2, 3), (2, 2)])
    set_group(session, "reward", score=lengths_as_rewards)
    whole, parts = scored_by(session, rollouts), scored_by(session, *rollouts.split([2, 2, 1]))
    for name in ("rewards", "valid", "length"):
        assert torch.equal(parts[name], whole[name])
    assert parts["valid"].tolist() == [True, True, True, False, True]
    pending = PendingRewards(session.scorers)
    for rows in ([4, 1], [2], [3, 0]):  # as groups end
        pending.submit(rollouts.select(rows))
    ended = collect_rewards(session, session.begin_step(1), rollouts, pending)
    for name in ("rewards", "valid", "length"):
        assert torch.equal(ended[name], whole[name])


def test_a_recipe_may_reorder_its_rows_before_or_after_they_are_submitted(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2), (2, 3), (2, 2)])
    set_group(session, "reward", score=lengths_as_rewards)
    order = [3, 0, 4, 2, 1]
    lengths = [5, 6, 4, 3, 12]
    for submitted in (rollouts, rollouts.select(order), rollouts.select([4, 3, 2, 1, 0])):
        pending = PendingRewards(session.scorers)
        pending.submit(submitted)
        scored = collect_rewards(session, session.begin_step(1), rollouts.select(order), pending)
        assert scored["length"].tolist() == scored["input_ids"].lengths.tolist() == lengths
        assert scored["rewards"].tolist() == [0, *lengths[1:]]
        assert scored["valid"].tolist() == [False, True, True, True, True]


def test_repeated_rows_have_the_reward_of_each_copy(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2)]).select([2, 0, 2])
    set_group(session, "reward", score=lengths_as_rewards)
    assert scored_by(session, rollouts)["rewards"].tolist() == [3, 6, 3]
    assert scored_by(session, rollouts, rollouts)["rewards"].tolist() == [3, 6, 3] * 2


def test_rows_that_were_not_submitted_are_refused(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2)])
    set_group(session, "reward", score=lengths_as_rewards)
    pending = PendingRewards(session.scorers)
    pending.submit(rollouts.select([0, 1]))
    with pytest.raises(DataError, match="rows of the two batches differ"):
        collect_rewards(session, session.begin_step(1), rollouts.select([1, 2]), pending)


def test_columns_that_come_with_one_part_only_are_an_error_of_the_role(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9)])

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        columns = lengths_as_rewards(batch)
        return columns if columns["rewards"][0] == 6 else columns.drop(["length"])

    set_group(session, "judge", score=score)
    with pytest.raises(
        RoleError, match=r"role judge, some rank, in score: .*two parts of the batch can't be concatenated"
    ):
        scored_by(session, *rollouts.split([1, 1]))


def test_a_part_of_rows_that_batching_drops_may_come_back_in_other_types(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2)])

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        scored, tokens = batch["input_ids"].lengths <= 8, batch["input_ids"]
        has_rows = bool(scored.any())  # of no rows, torch.tensor([]) is float32
        levels = scored.long() if has_rows else scored.float()
        columns = {"level": levels, "note": ["so" if has_rows else None] * len(scored)}
        marks = tokens.with_values(tokens.values.float() if has_rows else tokens.values * 0)
        quiet = torch.zeros(len(scored), dtype=torch.bool)
        return batch.keep([]).union({"rewards": scored.float(), "quarantined": quiet, "marks": marks, **columns})

    set_group(session, "judge", Batching(max_tokens=8, overlong="drop"), score=score)
    scored = scored_by(session, *rollouts.split([1, 1, 1]))
    assert (scored["level"].tolist(), scored["note"]) == ([1, 0, 1], ["so", None, "so"])
    assert scored["valid"].tolist() == [True, False, True]
    assert torch.equal(scored["marks"].lengths, rollouts["input_ids"].lengths)
    assert not scored["marks"].rows()[1].any()


def test_the_flops_of_every_scored_part_count_in_the_step_that_waits_for_them(tmp_path: Path):
    session = session_of(tmp_path)

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        zeros = torch.zeros(batch.num_rows)
        return batch.keep([]).union({"rewards": zeros, "quarantined": zeros > 0})

    set_group(session, "reward", score=score)
    set_group(session, "reward_model", score=score)
    flops = {"reward_model": ModelFlops(Cost(linear=1.0, quadratic=0.0))}
    session.performance = PerformanceMeter(session.groups, flops)
    step, parts = session.begin_step(1), (tiny_rollouts([(2, 4)]), tiny_rollouts([(3, 9)]))
    scored_by(session, *parts, step=step)
    tokens = sum(int(part["input_ids"].lengths.sum()) for part in parts)
    assert session.performance.work.pop() == {("reward_model", "score"): tokens}


def test_the_rate_of_a_reward_model_is_logged_though_batches_are_drawn_ahead_of_their_steps(tmp_path: Path):
    session = session_of(tmp_path, trainer=Trainer(lead=1, steps=3))
    vars(session)["rollout_weights"] = SimpleNamespace(version=1, publish=lambda canary: 0.0)

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        zeros = torch.zeros(batch.num_rows)
        return batch.keep([]).union({"rewards": zeros, "quarantined": zeros > 0})

    def draw(session: Session, step: StepContext) -> Batch:
        pending, rollouts = PendingRewards(session.scorers), tiny_rollouts([(2, 4), (3, 9)])
        pending.submit(rollouts)
        step.advance(prompts_consumed=step.progress.prompts_consumed + 1)
        return Batch(rollouts, partial(collect_rewards, session, pending=pending))

    model = set_group(session, "reward_model", score=score)
    model.ranks.pop_usage = lambda role: {"score": Usage(1.0)}
    flops = {"reward_model": ModelFlops(Cost(linear=1e9, quadratic=0.0))}
    session.performance = PerformanceMeter(session.groups, flops, {"reward_model": Pending(lambda: [1e12])})
    queue = AheadQueue(session, draw)
    for step in session.steps("train", 3):
        queue.take(step)
        queue.publish(step)
    rates = [record.get("perf/tflops/reward_model_scores") for record in run_of(session).records]
    assert rates == [
        pytest.approx(2 * 18e9 / 1e12),
        pytest.approx(18e9 / 1e12),
        None,
    ]  # of batches 1 and 2, 3, and none


class BusyRanks:
    """Ranks whose calls are running until they are in `answered`."""

    def __init__(self) -> None:
        self.answered: set[int] = set()

    def wait_any(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[int]:
        return [place for place, one in enumerate(pending) if self.answered.intersection(one.answers)]


def scores_of_lengths(batch: BatchedDataDict) -> BatchedDataDict:
    return lengths_as_rewards(batch).drop(["length"])


class BusyGroup(AnsweringGroup):
    """A role of two data ranks, whose calls answer (`is_background=False`) or don't say when they end."""

    def __init__(self, role: str, *, is_background: bool = False) -> None:
        super().__init__(role, Batching(), {"score": scores_of_lengths})
        self.dp_size, self.ranks, self.is_background = 2, cast(Any, BusyRanks()), is_background
        self.scored: list[list[int]] = []

    def submit(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.scored.append(args[0].row_ids.tolist())
        answers = () if self.is_background else (len(self.scored),)
        return Pending(partial(self.run, method, *args, **kwargs), answers)


def busy_session(tmp_path: Path) -> tuple[Session, BusyGroup, BusyGroup]:
    session, model, judge = session_of(tmp_path), BusyGroup("reward_model"), BusyGroup("judge", is_background=True)
    session.groups |= {"reward": cast(Any, model), "judge": cast(Any, judge)}
    return session, model, judge


def test_groups_that_end_while_a_role_is_busy_share_its_next_call(tmp_path: Path):
    session, model, judge = busy_session(tmp_path)
    rollouts = tiny_rollouts([(1, 1 + row % 5) for row in range(28)])
    groups, pending = [rollouts.select([row, row + 1]) for row in range(0, 28, 2)], PendingRewards(session.scorers)
    with pending.collecting("vllm"):
        pending.submit(groups[3])
        assert model.scored == [[6, 7]], "an idle role gets a group at once"
        pending.submit(groups[0])
        pending.submit(groups[2])
        assert model.scored[1:] == []
        model.ranks.answered = {1}
        pending.submit(groups[1])
        assert model.scored[1:] == [[0, 1, 4, 5, 2, 3]], "it gets all that wait once it has answered"
        for group in groups[4:9]:
            pending.submit(group)
        assert model.scored[2:] == [[8, 9, 10, 11, 12, 13, 14, 15]], "or once there are 4 rows for each of 2 ranks"
        model.ranks.answered = {1, 2}  # of two calls that were running
        pending.submit(groups[9])
        assert model.scored[3:] == [[16, 17, 18, 19]]
        model.ranks.answered = {1, 2, 3, 4}
        pending.submit(groups[10])
        assert model.scored[4:] == [[20, 21]]
        pending.submit(groups[11])
        pending.submit(groups[12])
    assert model.scored[5:] == [[22, 23, 24, 25]], "no row waits once all are generated"
    pending.submit(groups[13])
    assert model.scored[6:] == [[26, 27]]
    assert judge.scored == [groups[place].row_ids.tolist() for place in (3, 0, 2, 1, *range(4, 14))]
    scored = collect_rewards(session, session.begin_step(1), rollouts, pending)
    whole = scored_by(session, rollouts)
    for name in ("rewards", "valid", "rewards_of_reward_model", "rewards_of_judge"):
        assert torch.equal(scored[name].nan_to_num(-1.0), whole[name].nan_to_num(-1.0))


def test_parts_of_an_engine_that_is_reproducible_are_separate_calls(tmp_path: Path):
    session, model, _ = busy_session(tmp_path)
    pending, rollouts = PendingRewards(session.scorers), tiny_rollouts([(2, 4), (3, 9), (1, 2)])
    with pending.collecting("hf"):
        for part in rollouts.split([1, 1, 1]):
            pending.submit(part)
    assert model.scored == [[0], [1], [2]]


def test_rows_that_wait_are_not_submitted_after_a_generation_that_failed(tmp_path: Path):
    session, model, _ = busy_session(tmp_path)
    pending, rollouts = PendingRewards(session.scorers), tiny_rollouts([(2, 4), (3, 9)])

    def generate() -> None:
        with pending.collecting("vllm"):
            for part in rollouts.split([1, 1]):
                pending.submit(part)
            raise RuntimeError("an engine failed")

    with pytest.raises(RuntimeError, match="an engine"):
        generate()
    assert model.scored == [[0]]

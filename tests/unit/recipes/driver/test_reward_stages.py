"""What the driver makes of what scoring roles say; with processes: tests/distributed/test_worker_group.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Rollout
from rlpack.distributed.errors import RoleError
from rlpack.packing import Batching
from rlpack.recipes.driver import stages
from rlpack.recipes.driver.reward_stages import Scoring, finish_scoring
from rlpack.recipes.driver.session import Session
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.test_session import session_of, set_group


def scored_by(session: Session, *parts: BatchedDataDict) -> BatchedDataDict:
    """Return the rows of all parts with what the session's scoring roles say of them."""
    scoring = Scoring(session.scorers)
    for part in parts:
        scoring.begin(part)
    return finish_scoring(session, BatchedDataDict.concat(parts), scoring)


def test_roles_of_ones_own_get_tokens_and_rows_that_their_batching_drops_are_not_scored(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9)]).union({"completion": ["a", "b"]})

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        assert {"input_ids", "response_mask", "completion"} <= set(batch)
        zeros = torch.zeros(2)
        return batch.keep([]).union({"rewards": zeros + 1, "quarantined": zeros > 0})

    set_group(session, "reward", score=score)
    set_group(session, "judge", Batching(max_tokens=8, overlong="drop"), score=score)
    scoring = Scoring(session.scorers)
    scoring.begin(rollouts)
    rewards, valid, _, _ = scoring.finish()
    assert (rewards.tolist(), valid.tolist()) == ([2.0, 0.0], [True, False])


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            {"praise": torch.zeros(2)},
            r"role judge, some rank, in score: it adds the column 'praise'; .* give it another",
        ),
        ({"advantages": torch.zeros(2)}, "it adds the column 'advantages'"),  # which a later stage will add
        ({"level": [1, 2]}, "it adds the column 'level'"),  # which the dataset has
        ({"baseline": torch.zeros(2)}, "it adds the column 'baseline'"),  # a key of algorithm
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


def test_what_scoring_roles_say_of_their_work_is_summed_over_roles_and_over_the_calls_of_a_step(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2)]).union({"completion": [*"abc"]})

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        zeros = torch.zeros(3)
        failures = torch.tensor([0, 1, 4])  # a row that was late, one without a number
        part = torch.tensor([0.5, torch.nan, 1.0])
        return batch.keep([]).union(
            {"rewards": zeros + 1, "quarantined": failures > 0, "reward_failure": failures, "reward_style": part}
        )

    def judge(batch: BatchedDataDict) -> BatchedDataDict:
        zeros = torch.zeros(3)
        failures = torch.tensor([0, 1, 0])
        said = {"reward_failure": failures, "reward_retries": torch.tensor([5, 0, 0])}
        return batch.keep([]).union({"rewards": zeros, "quarantined": zeros > 0, **said})

    set_group(session, "reward", score=score)
    set_group(session, "judge", score=judge)
    scored = scored_by(session, rollouts)
    scored_by(session, rollouts)
    assert "reward_failure" not in scored
    assert scored["reward_style"][0] == 0.5
    figures = {name: session.metrics[f"reward/{name}"] for name in ("timeouts", "errors", "invalid", "retries")}
    assert figures == {"timeouts": 4.0, "errors": 0.0, "invalid": 2.0, "retries": 10.0}
    assert session.metrics["reward/functions/style"] == 0.75
    assert scored["rewards_of_reward"].nan_to_num(-1.0).tolist() == [1.0, -1.0, -1.0]
    assert (session.metrics["reward/roles/reward"], session.metrics["reward/roles/judge"]) == (1.0, 0.0)
    assert session.metrics["reward/quarantined"] == 2


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


def test_columns_that_come_with_one_part_only_are_the_roles_fault(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9)])

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        found = lengths_as_rewards(batch)
        return found if found["rewards"][0] == 6 else found.drop(["length"])

    set_group(session, "judge", score=score)
    with pytest.raises(RoleError, match=r"role judge, some rank, in score: .*one part of the batch and of the next"):
        scored_by(session, *rollouts.split([1, 1]))


def test_a_part_of_rows_that_batching_drops_may_come_back_in_other_types(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (3, 9), (1, 2)])

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        scored, tokens = batch["input_ids"].lengths <= 8, batch["input_ids"]
        given = bool(scored.any())  # of no rows, torch.tensor([]) is float32
        columns = {"level": scored.long() if given else scored.float(), "note": ["so" if given else None] * len(scored)}
        marks = tokens.with_values(tokens.values.float() if given else tokens.values * 0)
        quiet = torch.zeros(len(scored), dtype=torch.bool)
        return batch.keep([]).union({"rewards": scored.float(), "quarantined": quiet, "marks": marks, **columns})

    set_group(session, "judge", Batching(max_tokens=8, overlong="drop"), score=score)
    found = scored_by(session, *rollouts.split([1, 1, 1]))
    assert (found["level"].tolist(), found["note"]) == ([1, 0, 1], ["so", None, "so"])
    assert found["valid"].tolist() == [True, False, True]
    assert torch.equal(found["marks"].lengths, rollouts["input_ids"].lengths)
    assert not found["marks"].rows()[1].any()


@given(prompts=st.integers(1, 40), samples=st.integers(1, 9), max_num_seqs=st.integers(1, 50), ranks=st.integers(1, 4))
def test_responses_come_in_parts_of_whole_groups_that_the_engines_run_at_one_time(
    tmp_path_factory: pytest.TempPathFactory, prompts: int, samples: int, max_num_seqs: int, ranks: int
):
    session = session_of(tmp_path_factory.getbasetemp(), rollout=Rollout(max_num_seqs=max_num_seqs))
    sizes: list[int] = []
    parts: list[BatchedDataDict] = []

    def generate(batch: BatchedDataDict, params: Any) -> BatchedDataDict:
        assert not sizes or len(sizes) == len(parts), "a part is passed on before the next is asked for"
        sizes.append(batch.num_rows)
        return batch.keep(["group_ids"]).union({"seen": batch["seeds"]})

    set_group(session, "rollout", generate=generate).num_ranks = ranks
    rows = BatchedDataDict({"input_ids": tiny_rollouts([(1, 0)] * prompts)["input_ids"], "uid": ["a"] * prompts})
    draw = stages.Draw(rows, 1, np.arange(prompts))
    found = stages.respond(session, draw, samples, 1.0, parts.append)
    assert [part.num_rows for part in parts] == sizes
    assert all(size % samples == 0 for size in sizes)
    assert max(sizes) <= max(samples, ranks * max_num_seqs)
    assert max(sizes) - min(sizes) <= samples
    sizes.clear()
    whole = stages.respond(session, draw, samples, 1.0)
    assert sizes == [prompts * samples]
    assert torch.equal(found["seen"], whole["seen"])
    assert found["group_ids"].tolist() == whole["group_ids"].tolist()

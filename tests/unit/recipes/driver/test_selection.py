"""Which groups a step trains on, over roles that answer as they are told to."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Rollout, Trainer
from rlpack.config.sections.value_models import Dapo
from rlpack.recipes.driver.reward_stages import Scoring
from rlpack.recipes.driver.selection import greedy_rewards, informative_rollouts, respond_greedily, without_cut_off
from rlpack.recipes.driver.stages import draw_prompts, weighed
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.test_session import SavingSession, session_of, set_group

TRAINER = Trainer(prompts_per_step=3, group_size=2)


def answering(folder: Path, rounds: Sequence[Sequence[float]], dapo: Dapo) -> tuple[SavingSession, list[int]]:
    """Return a session whose roles make two responses a prompt, with the rewards of each round, and what was asked."""
    session = session_of(folder, trainer=TRAINER, dapo=dapo, rollout=Rollout(max_new_tokens=10))
    asked: list[int] = []

    def generate(prompts: BatchedDataDict, params: object) -> BatchedDataDict:
        asked.append(prompts.num_rows)
        made = tiny_rollouts([(3, 10 if row % 2 else 4) for row in range(prompts.num_rows)])
        reasons = ["length" if row % 2 else "stop" for row in range(prompts.num_rows)]
        texts = [str(row) for row in range(prompts.num_rows)]
        columns = {name: column for name, column in made.items() if name not in {"finish_reason", "group_ids", "uid"}}
        back = prompts.keep(["group_ids", "uid"]).union(columns)
        return back.union({"finish_reason": reasons, "completion": texts})

    def score(sent: BatchedDataDict) -> BatchedDataDict:
        rewards = torch.tensor(rounds[len(asked) - 1])
        return sent.keep([]).union({"rewards": rewards, "quarantined": torch.zeros(len(rewards), dtype=torch.bool)})

    set_group(session, "rollout", generate=generate)
    set_group(session, "reward", score=score)
    return session, asked


def test_prompts_are_drawn_until_all_groups_teach_something(tmp_path: Path) -> None:
    rounds = [[0.0, 1.0, 1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0]]
    session, asked = answering(tmp_path, rounds, Dapo(max_rounds=5))
    rollouts = informative_rollouts(session, 1)
    assert asked == [6, 4, 2]  # only as many as are missing
    assert rollouts["rewards"].tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert rollouts["group_ids"].unique().numel() == 3
    assert len(set(rollouts["uid"])) == 3  # no prompt twice
    assert session.metrics["sampling/rounds"] == 3
    assert session.metrics["sampling/informative_fraction"] == 0.5
    assert session.metrics["sampling/discarded_groups"] == 3
    assert session.metrics["sampling/filled_groups"] == 0
    assert session.metrics["reward/mean"] == pytest.approx(5 / 12)  # of all that was sampled
    assert session.progress.prompts_seen == 6


def test_what_is_missing_after_the_last_round_is_filled_up_with_groups_that_add_nothing(tmp_path: Path) -> None:
    rounds = [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    session, _ = answering(tmp_path, rounds, Dapo(max_rounds=2))
    rollouts = informative_rollouts(session, 1)
    assert rollouts.num_rows == 6
    assert rollouts["rewards"].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert session.metrics["sampling/filled_groups"] == 2


def test_length_is_punished_before_groups_are_compared(tmp_path: Path) -> None:
    session, _ = answering(tmp_path, [[1.0] * 6], Dapo(max_rounds=1, overlong_buffer=5, overlong_penalty=0.5))
    rollouts = informative_rollouts(session, 1)
    assert rollouts["rewards"].tolist() == [1.0, 0.5] * 3  # every second response has all ten tokens
    assert session.metrics["sampling/informative_fraction"] == 1.0


@pytest.mark.parametrize(("asked_for", "shares"), [(True, [0.25, 0.0]), (False, [1 / 14, 1 / 14])])
def test_responses_that_were_cut_off_count_nothing_if_that_is_asked_for(
    tmp_path: Path, asked_for: bool, shares: list[float]
) -> None:
    session = session_of(tmp_path, dapo=Dapo(overlong_filter=asked_for))
    rollouts = tiny_rollouts([(3, 4), (3, 10)]).drop(["finish_reason"])
    rollouts = rollouts.union({"finish_reason": ["stop", "length"], "response_tokens": torch.tensor([4, 10])})
    set_group(session, "actor")
    found = weighed(session, without_cut_off(session, rollouts).union({"valid": torch.ones(2, dtype=torch.bool)}))
    assert found["token_weight"].tolist() == pytest.approx(shares)
    assert found["response_tokens"].tolist() == [4, 10]  # what advantages are made of stays
    assert session.metrics.get("sampling/overlong_filtered", 0.0) == float(asked_for)


def test_responses_are_compared_with_the_likeliest_of_their_prompt(tmp_path: Path) -> None:
    session, _ = answering(tmp_path, [[0.25, float("nan"), 0.75]], Dapo())
    broken = torch.tensor([False, True, False])
    set_group(
        session,
        "reward",
        score=lambda sent: sent.keep([]).union(
            {"rewards": torch.tensor([0.25, torch.nan, 0.75]), "quarantined": broken}
        ),
    )
    greedy = Scoring(session.scorers)
    respond_greedily(session, draw_prompts(session, 1), greedy.begin)
    rollouts = tiny_rollouts([(2, 4)] * 6).union({"valid": torch.tensor([True] * 5 + [False])})
    found = greedy_rewards(session, rollouts, greedy)
    assert found["greedy_rewards"].tolist() == [0.25, 0.25, 0.0, 0.0, 0.75, 0.75]
    assert found["valid"].tolist() == [True, True, False, False, True, False]
    assert session.metrics["reward/greedy_mean"] == 0.5

"""The trial of `rollout.deterministic`: what depends on the rows that run together is found, in a single bit."""

import dataclasses

import numpy as np
import pytest
import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.deterministic import check_deterministic
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import Generations, SamplingParams


class RowByRow:
    """Samples uniformly by each row's seed; a subclass lets other rows show."""

    vocab_size = 50

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        shape = params.max_new_tokens
        rows = [torch.from_numpy(np.random.default_rng(seed).integers(50, size=shape)) for seed in seeds]
        made = Generations(
            token_ids=Ragged.from_rows(rows, torch.int64),
            logprobs=Ragged.from_rows([torch.full((shape,), -3.912023) for _ in rows], torch.float32),
            policy_versions=Ragged.from_rows([torch.zeros(shape, dtype=torch.int32) for _ in rows], torch.int32),
            finish_reasons=["length"] * len(rows),
        )
        return self.disturb(made)

    def disturb(self, made: Generations) -> Generations:
        return made


class RoundsByRowCount(RowByRow):
    """Changes the last bit of one log-prob when few rows run."""

    def disturb(self, made: Generations) -> Generations:
        if made.token_ids.num_rows < 5:
            made.logprobs.values[-1] = torch.nextafter(made.logprobs.values[-1], torch.tensor(0.0))
        return made


class SeesItsPlace(RowByRow):
    """Samples another token in the first row, whichever it is."""

    def disturb(self, made: Generations) -> Generations:
        tokens = made.token_ids.values.clone()
        tokens[0] = (tokens[0] + 1) % 50
        return dataclasses.replace(made, token_ids=made.token_ids.with_values(tokens))


def trial(engine: RowByRow, max_length: int = 64) -> None:
    check_deterministic(engine, max_length=max_length, max_num_seqs=40)


@pytest.mark.parametrize("max_length", [2, 17, 64, 4096])
def test_rows_that_depend_on_nothing_else_pass(max_length: int):
    trial(RowByRow(), max_length)


def test_a_single_bit_of_a_log_prob_is_found():
    with pytest.raises(
        EngineError, match=r"rollout.deterministic=true: .* has different log-probs alone than among 40"
    ):
        trial(RoundsByRowCount())


def test_a_token_that_depends_on_the_order_is_found():
    with pytest.raises(EngineError, match="has different tokens in another order"):
        trial(SeesItsPlace())

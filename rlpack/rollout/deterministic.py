"""`rollout.deterministic`: a row's tokens and log-probs depend on its prompt, its seed and the weights alone.

In general they also depend on other rows: a matrix product of more rows may round differently, and a sampled token can
change with the last bit of its logits. This depends on kernels, dtypes and devices, so an engine that has to be
deterministic is tested when it starts.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import Generations, SamplingParams

# Enough rows for the kernels of large batches; an engine runs no more than its `max_num_seqs` together.
_LEAST_ROWS, _MOST_ROWS, _SEED = 24, 256, 31
# Rows that are also generated alone.
_ALONE = (0, 11, 23)
_LONGEST_PROMPT, _NEW_TOKENS = 64, 16


class Generator(Protocol):
    """The part of an engine that the test needs."""

    vocab_size: int

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        """Return one response for each prompt, as documented at `Engine.generate`."""
        ...


def check_deterministic(engine: Generator, *, max_length: int, max_num_seqs: int) -> None:
    """Raise unless an engine generates the same rows together, in another order and alone.

    Args:
        engine: the engine, with any weights.
        max_length: most tokens of a row, prompt and response together.
        max_num_seqs: rows that the engine runs together.

    Raises:
        EngineError: a row's tokens or log-probs differ in at least one bit.
    """
    new_tokens = min(_NEW_TOKENS, max_length - 1)
    params = SamplingParams(max_new_tokens=new_tokens)
    num_rows = max(_LEAST_ROWS, min(_MOST_ROWS, max_num_seqs))
    prompts = _prompts(num_rows, engine.vocab_size, min(_LONGEST_PROMPT, max_length - new_tokens))
    seeds = np.arange(num_rows, dtype=np.uint64)
    expected = list(_rows(engine.generate(prompts, params, seeds)))
    order = np.random.default_rng(_SEED).permutation(num_rows)
    for name, chosen in (("in another order", order), *(("alone", np.array([row])) for row in _ALONE)):
        made = _rows(engine.generate(prompts.select(torch.from_numpy(chosen)), params, seeds[chosen]))
        for row, (tokens, logprobs) in zip(chosen.tolist(), made, strict=True):
            together = expected[row]
            if torch.equal(tokens, together[0]) and torch.equal(logprobs, together[1]):
                continue
            what = "tokens" if not torch.equal(tokens, together[0]) else "log-probs"
            raise EngineError(
                f"rollout.deterministic=true: a row of {int(prompts.lengths[row])} prompt tokens has different {what} "
                f"{name} than among {num_rows} rows, so this engine's rounding depends on the rows that run together; "
                "set rollout.deterministic=false, or on a CPU rollout.dtype=fp32"
            )


def _prompts(num_rows: int, vocab_size: int, longest: int) -> Ragged:
    """Return random prompts in equal pairs, as in a group, because engines share the prefix of equal prompts."""
    rng = np.random.default_rng(_SEED)
    lengths = rng.integers(1, longest, -(-num_rows // 2), endpoint=True)
    distinct = [torch.from_numpy(rng.integers(vocab_size, size=length)) for length in lengths]
    return Ragged.from_rows([row for row in distinct for _ in range(2)][:num_rows], torch.int64)


def _rows(made: Generations) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tokens and log-probs of each row."""
    return zip(made.token_ids.rows(), made.logprobs.rows(), strict=True)

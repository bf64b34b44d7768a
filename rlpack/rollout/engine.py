"""The protocol that every generation engine follows: token ids in, token ids out, nothing decoded on the way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from rlpack.batch.ragged import Ragged
from rlpack.rollout.errors import EngineError, SamplingError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: temperature first, then the k likeliest, then the nucleus of what is left.

    >>> SamplingParams(temperature=0.0, max_new_tokens=8).is_greedy
    True

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token (evaluation).
        top_p: the smallest set of tokens with at least this probability is kept (nucleus, arXiv:1904.09751).
        top_k: the k likeliest tokens are kept, with all that tie with the last of them; 0 keeps all.
        max_new_tokens: longest response, its stop token included.
        stop_token_ids: ids that end a response; the stop token belongs to it.

    Raises:
        SamplingError: a value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every value against its range."""
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more"),
            ("stop_token_ids", self.stop_token_ids, min(self.stop_token_ids, default=0) >= 0, "ids of 0 or more"),
        )
        for name, value, is_fine, allowed in checks:
            if not is_fine:
                raise SamplingError(f"{name} is {value}; rollout.{name} has to be {allowed}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken every time."""
        return self.temperature == 0


@dataclass(frozen=True)
class Generations:
    """One response for every prompt, in the prompts' order.

    Attributes:
        token_ids: responses without their prompts, the stop token included, int64 [B rows].
        logprobs: log-probability of each token under the distribution that it was drawn from (after temperature,
            top-k and top-p, renormalised; greedy: 0), f32, lengths as `token_ids`.
        finish_reasons: `stop` after a stop token, `length` at the limit, one a row.
        policy_version: the number of optimizer steps behind the weights that generated.

    Raises:
        EngineError: the columns don't fit together.
    """

    token_ids: Ragged
    logprobs: Ragged
    finish_reasons: list[FinishReason]
    policy_version: int

    def __post_init__(self) -> None:
        """Check that there is one log-prob a token and one reason a row."""
        if not self.token_ids.lengths.equal(self.logprobs.lengths):
            counts = f"{self.token_ids.values.shape[0]} tokens and {self.logprobs.values.shape[0]} log-probs"
            raise EngineError(f"the engine returned {counts}; every token needs one, row by row")
        if len(self.finish_reasons) != self.token_ids.num_rows:
            reasons = len(self.finish_reasons)
            raise EngineError(f"the engine returned {reasons} finish reasons for {self.token_ids.num_rows} rows")


class Engine(Protocol):
    """Generates with the newest weights it was given."""

    @property
    def policy_version(self) -> int:
        """The number of optimizer steps behind the engine's weights."""
        ...

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        """Return one response for each prompt.

        Args:
            prompts: token ids, int64, B rows of at least one token.
            params: how to sample.
            seeds: uint64 or int64 [B]; a row's randomness depends on its seed alone, not on its neighbours.
        """
        ...

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take the weights of policy version `version`, under the names that transformers gives them."""
        ...

"""The protocol of generation engines: token ids in, token ids out, no text in between."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from rlpack.batch.ragged import Ragged
from rlpack.rollout.types import Generations, SamplingParams


class Engine(Protocol):
    """Generates with the newest weights it was given."""

    @property
    def policy_version(self) -> int:
        """The number of weight publications received."""
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

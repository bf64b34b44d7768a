"""The protocol of generation engines, and the engines by name.

Token ids go in and token ids come out, with no text in between. A new engine is one file with a class that follows
`Engine`, and one line in `ENGINES`.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.ragged import Ragged
from rlpack.batch.weight_layout import WeightLayout
from rlpack.config.schema import Model, Placement, Rollout
from rlpack.rollout.types import Generations, SamplingParams

# `rollout.engine` to package.module:Class; only the selected engine is imported.
ENGINES = {"hf": "rlpack.rollout.hf:HFEngine", "vllm": "rlpack.rollout.vllm.vllm_engine:VLLMEngine"}


class Engine(Protocol):
    """Generates with the weights it received last.

    The layout of the weights is checked once. New weights arrive as one `load_bucket` call per bucket of the layout,
    checked and in order. Then `finish_update` is called, `logprobs` scores the canary, and `policy_version` is set.

    Attributes:
        policy_version: the number of weight publications received, 0 before the first; it is stamped on every token.
        dtype: floating-point type of the weights that the engine receives.
        vocab_size: token ids are below it.
    """

    policy_version: int
    dtype: torch.dtype
    vocab_size: int

    @classmethod
    def from_settings(
        cls,
        model: Model,
        settings: Rollout,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        seed: int,
        max_length: int,
        placement: Placement | None = None,
    ) -> Self:
        """Build the engine on one rank.

        Args:
            model: the `model` section: architecture, and weights to start from.
            settings: the `rollout` section.
            tokenizer: the policy's tokenizer.
            device: the rank's device.
            seed: seed of a new model's weights.
            max_length: maximum tokens of a row (prompt and response, or canary); determines the size of caches.
            placement: the `placement` section, for deadlines; None for its defaults.
        """
        ...

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        """Return one response for each prompt.

        Args:
            prompts: token ids, int64, B rows of at least one token.
            params: how tokens are sampled.
            seeds: uint64 or int64 [B]; the random numbers of a row depend only on its seed, not on other rows.
        """
        ...

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Return log p(token | tokens before it) at temperature 1, f32 [R, L]; 0 for the first token of each row.

        Args:
            token_ids: int64 [R, L], no padding.
        """
        ...

    def check_weights(self, layout: WeightLayout) -> None:
        """Check that weights of this layout, under the names that transformers gives them, fit the model.

        Raises:
            EngineError: a name or a shape does not fit.
        """
        ...

    def load_bucket(self, weights: Mapping[str, Tensor]) -> None:
        """Copy one bucket, a mapping from name to tensor on the CPU; the caller frees it afterwards.

        An engine may return before the bucket is loaded; if loading fails, a later call of the update raises.

        Raises:
            BucketError: this bucket or an earlier one could not be loaded.
        """
        ...

    def finish_update(self) -> None:
        """Apply the received weights, after the last bucket of an update and before the canary is scored.

        Raises:
            EngineError: the weights could not be applied.
        """
        ...


class FinishedRow(NamedTuple):
    """A row that an engine has finished, with a response or a failure.

    Attributes:
        key: the row's key when it was started.
        response: what the engine returned, for `StreamingEngine.to_generations`; None if it failed.
        failure: why there is no response; "" if there is one.
        policy_version: the engine's policy version when the row ended; None for the one that it has now.
    """

    key: int
    response: Any
    failure: str
    policy_version: int | None = None


class StreamingEngine(Engine, Protocol):
    """An engine that returns rows as they finish, while others are still running."""

    def begin(self, keys: Sequence[int], prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> None:
        """Start rows and return at once.

        Args:
            keys: identify the rows; distinct among those in flight.
            prompts: as for `generate`.
            params: as for `generate`.
            seeds: as for `generate`.

        Raises:
            SamplingError: a prompt is empty or too long.
        """
        ...

    def finished(self, timeout_s: float) -> list[FinishedRow]:
        """Wait for rows to finish, and return those that finished since the last call; [] at the deadline."""
        ...

    def to_generations(self, responses: Sequence[Any], params: SamplingParams) -> Generations:
        """Return the rows' tokens.

        Raises:
            EngineError: a response has values that no model returns.
        """
        ...

    def abort(self, keys: Sequence[int] | None = None) -> None:
        """Abort the rows in flight with these keys, by default all; callers ignore results that still arrive."""
        ...

    def interrupt(self) -> None:
        """Stop sampling until `resume`; rows in flight keep the tokens sampled so far, and new rows wait.

        The engine can load weights meanwhile, and score the canary.

        Raises:
            EngineError: rows could not be stopped.
        """
        ...

    def resume(self) -> None:
        """Continue interrupted rows with the engine's current weights; do nothing without an interruption.

        The keys and values of the tokens so far are recomputed, unless the engine is configured to keep them. A
        continued row draws different random numbers than it would have drawn without the interruption.
        """
        ...

    def sleep(self) -> None:
        """Free GPU memory until `wake` or the end of an update; abort rows in flight, and refuse new ones."""
        ...

    def wake(self) -> bool:
        """Wake the engine; return False if its weights were discarded, so that an update is needed first."""
        ...

    @property
    def is_alive(self) -> bool:
        """Return whether the engine can answer requests."""
        ...

    def close(self) -> None:
        """End the engine's processes; it can't be used afterwards."""
        ...


# Engines that implement `StreamingEngine`.
STREAMING_ENGINES = frozenset({"vllm"})


def engine_class(name: str) -> type[Engine]:
    """Return the engine class that a value of `rollout.engine` names."""
    module, _, class_name = ENGINES[name].partition(":")
    return vars(importlib.import_module(module))[class_name]

"""Four decoders of the `hf` engine: ways to run any model token by token (`rlpack.rollout.decoding` chooses).

`rlpack.rollout.direct_decoder` has the fifth, for models whose layers are known.
"""

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.batch.ragged import Ragged
from rlpack.models.own_attention import forward_arguments
from rlpack.rollout.errors import EngineError
from rlpack.rollout.kv_cache import BufferedCache, mask_windows

# Names under which models return their cache and accept it back; `cache` since transformers 5.24.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
# Upper bound on the logits of one forward pass of whole rows (512 MiB in fp32).
_MAX_LOGITS = 2**27


class Decoder(Protocol):
    """The running rows (R rows) of one batch of prompts.

    Attributes:
        equal_lengths: whether all prompts of a batch must have one length.
    """

    equal_lengths: ClassVar[bool]

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        """Allocate room for `limit` tokens after the longest prompt."""
        ...

    def prefill(self) -> Tensor:
        """Run the prompts; return the logits after each, [R, V]."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, int64 [R]; return the logits after it, [R, V]."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows` (int64)."""
        ...


class PaddedDecoder:
    """Left-padded prompts with a key-value cache; equal prompts are run once."""

    equal_lengths: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        self._model, self._pad_token_id = model, pad_token_id
        self._prompts = prompts.to(model.device)
        self._width = int(prompts.lengths.max())
        self._positions = self._prompts.lengths.clone()[:, None]  # of the next token, [R, 1]
        self._padding = self._width - self._positions  # columns before the prompt, [R, 1]
        self._columns = torch.arange(self._width + limit, device=model.device)
        self._cache = BufferedCache(model, self._width + limit)
        self._arguments = frozenset(forward_arguments(model, position_ids=None, logits_to_keep=None))
        self._cache_name = cache_name(model)

    def prefill(self) -> Tensor:
        """Run the prompts; see `Decoder`."""
        lengths, columns = self._prompts.lengths, self._columns[: self._width]
        tokens = torch.full((len(lengths), self._width), self._pad_token_id, device=lengths.device)
        tokens[columns >= self._padding] = self._prompts.values
        # The length distinguishes prompts whose padded rows are equal because they contain the padding id.
        unique, copies = torch.unique(torch.cat([lengths[:, None], tokens], 1), dim=0, return_inverse=True)
        padding = self._width - unique[:, :1]
        logits = self._forward(unique[:, 1:], (columns - padding).clamp(min=0), columns >= padding)
        self._cache.batch_select_indices(copies)
        return logits[copies]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; see `Decoder`."""
        self._width += 1
        logits = self._forward(tokens[:, None], self._positions, self._step_mask())
        self._positions += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        self._cache.keep(rows)
        self._positions, self._padding = self._positions[rows], self._padding[rows]

    def _step_mask(self) -> Any:
        """Return the newest column's mask in the form that the model takes: here bool [R, width], true for tokens."""
        return self._columns[: self._width] >= self._padding

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """Run the model on the newest columns; return the logits of the last."""
        extra = {"position_ids": positions, "logits_to_keep": 1}
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_name: self._cache},
            **{name: extra[name] for name in self._arguments},
        )
        return output.logits[:, -1]


class PreparedMaskDecoder(PaddedDecoder):
    """`PaddedDecoder` with masks ready for attention, which the model would build from bools in each step."""

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        super().__init__(model, prompts, limit, pad_token_id)
        self._windows = mask_windows(model, self._cache)
        self._mask = self._additive_mask()

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        super().keep(rows)
        self._mask = self._mask[rows]

    def _step_mask(self) -> Any:
        """Return the masks of the newest column by kind of layer; if there is only one, the mask itself."""
        masks = self._step_masks()
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _step_masks(self) -> dict[str, Tensor]:
        """Return additive masks [R, 1, 1, L] of the columns that each kind of layer sees."""
        if self._mask.shape[-1] < self._width:
            self._mask = self._additive_mask()
        first = {kind: max(0, self._width - window) if window else 0 for kind, window in self._windows.items()}
        return {kind: self._mask[..., start : self._width] for kind, start in first.items()}

    def _additive_mask(self) -> Tensor:
        """Return a mask for this step and, since later columns are never hidden, for steps after it."""
        hidden = self._columns[: self._width + self._width // 2 + 1] < self._padding
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None, None]


class EqualLengthDecoder:
    """Prompts of equal length, with the model's own cache, from which no rows are dropped."""

    equal_lengths: ClassVar[bool] = True

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        del limit
        self._model, self._pad_token_id = model, pad_token_id
        self._tokens = prompts.to(model.device).values.view(prompts.num_rows, -1)
        self._rows = torch.arange(prompts.num_rows, device=model.device)
        self._size, self._length = prompts.num_rows, 0
        self._cache_name, self._cache = cache_name(model), None

    def prefill(self) -> Tensor:
        """Run the prompts; see `Decoder`."""
        return self._forward(self._tokens)

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; see `Decoder`."""
        # Dropped rows continue with padding, which changes no other row.
        column = torch.full((self._size, 1), self._pad_token_id, dtype=torch.int64, device=tokens.device)
        column[self._rows, 0] = tokens
        return self._forward(column)[self._rows]

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        self._rows = self._rows[rows]

    def _forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(self._length, self._length + tokens.shape[1], device=tokens.device)
        self._length += tokens.shape[1]
        extra = forward_arguments(
            self._model, position_ids=positions.expand(len(tokens), -1), logits_to_keep=1, cache_position=positions
        )
        output = self._model(input_ids=tokens, use_cache=True, **{self._cache_name: self._cache}, **extra)
        # Remote code may still take `past_key_values`, which transformers' classes of outputs rename to `cache`.
        self._cache = next((value for name, value in output.items() if name in _CACHE_NAMES), None)
        if self._cache is None:
            raise EngineError("the model returns no cache")
        return output.logits[:, -1]


def cache_name(model: PreTrainedModel) -> str:
    """Return the name of the argument by which a model takes its cache; the most common one if it names none."""
    return next(iter(forward_arguments(model, **dict.fromkeys(_CACHE_NAMES))), "past_key_values")


class RecomputingDecoder:
    """Whole rows in every step, padded on the right, without a cache."""

    equal_lengths: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        self._model = model
        self._lengths = prompts.lengths.clone().to(model.device)
        width = int(prompts.lengths.max()) + limit
        self._tokens = torch.full((prompts.num_rows, width), pad_token_id, dtype=torch.int64)
        for row, tokens in enumerate(prompts.rows()):
            self._tokens[row, : tokens.shape[0]] = tokens
        self._tokens = self._tokens.to(model.device)

    def prefill(self) -> Tensor:
        """Run the prompts; see `Decoder`."""
        return self._forward()

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; see `Decoder`."""
        self._tokens[torch.arange(len(tokens), device=tokens.device), self._lengths] = tokens
        self._lengths += 1
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        self._tokens, self._lengths = self._tokens[rows], self._lengths[rows]

    def _forward(self) -> Tensor:
        """Return the logits after each row's last token."""
        width = int(self._lengths.max())
        rows = max(1, _MAX_LOGITS // (width * self._model.config.get_text_config().vocab_size))
        logits = []
        for tokens, lengths in zip(self._tokens[:, :width].split(rows), self._lengths.split(rows), strict=True):
            output = self._model(input_ids=tokens, use_cache=False).logits
            logits.append(output[torch.arange(len(tokens), device=tokens.device), lengths - 1])
        return torch.cat(logits)

"""How the `hf` engine runs a model token by token: the fastest of four ways that is exact for the model.

| decoder | rows that run together | cost of a token |
|---|---|---|
| `PreparedMaskDecoder` | prompts of any lengths, padded on the left | one column |
| `PaddedDecoder` | the same; the model builds its masks | one column, and masks |
| `EqualLengthDecoder` | prompts of one length | one column |
| `RecomputingDecoder` | prompts of any lengths | the whole row |

Recurrent layers would read padding on the left as tokens, and some models ignore a mask or positions. Such a model
samples from another distribution than the one that is trained, without an error. So each decoder is tried against
whole rows without a cache.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.batch.ragged import Ragged
from rlpack.models.check_rows import affordable_slots
from rlpack.models.checks import has_experts
from rlpack.models.length_thresholds import length_thresholds, longest_row, selections
from rlpack.models.own_attention import forward_arguments
from rlpack.models.rope import frequency_limits
from rlpack.rollout.errors import EngineError
from rlpack.rollout.kv_cache import BufferedCache, mask_windows
from rlpack.rollout.whole_rows import last_logits, relative_gap

_log = logging.getLogger(__name__)

# Allowed difference for up to 8 layers, relative to the largest logit. Rounding reaches 5e-6; with new weights, which
# are small, a wrong cache can differ by as little as 4e-4.
_TOLERANCE = 2e-4
# Tokens that are appended to each prompt in the trial.
_STEPS = 3
_SEED = 20240609
# Lengths of the trial's prompts: the first prompt occurs twice in a batch, as in a group; one is much longer.
_SHORT = (4, 9, 21, 30, 4)
# The longest thresholds that are tried: with any model, and with a small one.
_MAX_THRESHOLD, _MAX_SMALL_THRESHOLD = 512, 2048
# Only this many thresholds are tried, the largest ones: each costs a few forward passes.
_MOST_THRESHOLDS = 4
# The longest prompt that is tried with a small model, for thresholds that no known setting names. It is shorter for
# recurrent layers, which without their kernels take a Python step for each token.
_LONG, _LONG_RECURRENT = 400, 64
# Trials of a model that selects experts or keys. Rounding decides between two that are equally good. With experts that
# is rare, so one trial has to pass; with keys all have to, because a model with many ties has no exact log-probs.
_DRAWS = 3
# Names under which models return their cache and take it again.
_CACHE_NAMES = ("past_key_values", "cache_params", "state")
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

    def prefill(self) -> Tensor:
        """Run the prompts; see `Decoder`."""
        lengths, columns = self._prompts.lengths, self._columns[: self._width]
        tokens = torch.full((len(lengths), self._width), self._pad_token_id, device=lengths.device)
        tokens[columns >= self._padding] = self._prompts.values
        # The length tells prompts apart whose padded rows are equal because prompts contain the padding id.
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
        """Return what the model takes as the mask of the newest column: here bool [R, width], true for tokens."""
        return self._columns[: self._width] >= self._padding

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """Run the model on the newest columns; return the logits of the last."""
        extra = {"position_ids": positions, "logits_to_keep": 1}
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            **{name: extra[name] for name in self._arguments},
        )
        return output.logits[:, -1]


class PreparedMaskDecoder(PaddedDecoder):
    """`PaddedDecoder` with masks that are ready for attention; the model would build them from bools in each step."""

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        super().__init__(model, prompts, limit, pad_token_id)
        self._windows = mask_windows(model, self._cache)
        self._mask = self._additive_mask()

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        super().keep(rows)
        self._mask = self._mask[rows]

    def _step_mask(self) -> Any:
        """Return additive masks [R, 1, 1, L] of the columns that each kind of layer sees; one alone without a dict."""
        if self._mask.shape[-1] < self._width:
            self._mask = self._additive_mask()
        first = {kind: max(0, self._width - window) if window else 0 for kind, window in self._windows.items()}
        masks = {kind: self._mask[..., start : self._width] for kind, start in first.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive_mask(self) -> Tensor:
        """Return a mask for this step and, since later columns are never hidden, for steps after it."""
        hidden = self._columns[: self._width + self._width // 2 + 1] < self._padding
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None, None]


class EqualLengthDecoder:
    """Prompts of one length with the cache that the model makes itself, whose rows all stay."""

    equal_lengths: ClassVar[bool] = True

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        del limit
        self._model, self._pad_token_id = model, pad_token_id
        self._tokens = prompts.to(model.device).values.view(prompts.num_rows, -1)
        self._rows = torch.arange(prompts.num_rows, device=model.device)
        self._size, self._length = prompts.num_rows, 0
        self._cache: dict[str, Any] = {}

    def prefill(self) -> Tensor:
        """Run the prompts; see `Decoder`."""
        return self._forward(self._tokens)

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; see `Decoder`."""
        # Dropped rows go on with padding, which changes no other row.
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
        output = self._model(input_ids=tokens, use_cache=True, **self._cache, **extra)
        self._cache = {name: output[name] for name in _CACHE_NAMES if name in output}
        if not self._cache:
            raise EngineError("the model returns no cache")
        return output.logits[:, -1]


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


DECODERS: tuple[type[Decoder], ...] = (PreparedMaskDecoder, PaddedDecoder, EqualLengthDecoder, RecomputingDecoder)


@torch.inference_mode()
def choose_decoder(model: PreTrainedModel, pad_token_id: int, *, max_length: int | None = None) -> type[Decoder]:
    """Return the first decoder whose logits equal those of whole rows.

    Args:
        model: in evaluation mode, with the attention that generates.
        pad_token_id: of the engine.
        max_length: tokens of the longest row that will be generated; None if not known.

    Raises:
        EngineError: none is exact; the message says why for each.
    """
    reasons: list[str] = []
    for decoder in DECODERS:
        try:
            gap = _gap_of_draws(model, decoder, pad_token_id, max_length)
            reason = f"logits differ from those of whole rows by {gap:.1e} of the largest"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - architectures fail in their own ways
            gap, text = math.inf, (str(error).splitlines() or ["no message"])[0]
            reason = f"{type(error).__name__}: {text:.200}"
        if gap <= _tolerance(model):
            if reasons:
                _log.warning("%s generates by %s (%s)", type(model).__name__, decoder.__name__, "; ".join(reasons))
            return decoder
        if decoder is PreparedMaskDecoder:  # `PaddedDecoder` is as good but for some milliseconds, or says why not
            _log.debug("%s builds its own masks: %s", type(model).__name__, reason)
        else:
            reasons.append(f"{decoder.__name__}: {reason}")
    way_out = "use another model"
    if selected := [size for size in selections(model) if size < longest_row(model)]:
        way_out = (
            f"its attention selects keys in rows over {min(selected)} tokens, and rounding decides between keys that "
            "are equally good: keep rows within that length (data.max_prompt_tokens + rollout.max_new_tokens), or use "
            "another model"
        )
    raise EngineError(f"{type(model).__name__} can't generate: {'; '.join(reasons)}; {way_out}")


def _gap_of_draws(model: PreTrainedModel, decoder: type[Decoder], pad_token_id: int, max_length: int | None) -> float:
    """Return the gap that decides: the largest of all draws for a model that selects keys, else the smallest."""
    selects_keys, gaps = bool(selections(model)), []
    for draw in range(_DRAWS if selects_keys or has_experts(model) else 1):
        gaps.append(_largest_gap(model, decoder, pad_token_id, max_length, seed=_SEED + draw))
        if (gaps[-1] > _tolerance(model)) == selects_keys:
            break
    return max(gaps) if selects_keys else min(gaps)


def _tolerance(model: PreTrainedModel) -> float:
    """Return the allowed gap; rounding adds up over layers."""
    layers = model.config.get_text_config().to_dict().get("num_hidden_layers") or 1
    return _TOLERANCE * max(1.0, layers / 8)


def _largest_gap(
    model: PreTrainedModel, decoder: type[Decoder], pad_token_id: int, max_length: int | None, *, seed: int
) -> float:
    """Return the largest difference between a decoder's logits and those of whole rows, relative to the largest."""
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    gaps: list[Tensor] = []
    for lengths in _trial_lengths(model, max_length, equal=decoder.equal_lengths):
        rows = [torch.randint(vocab_size, (length + _STEPS,), generator=generator) for length in lengths]
        rows[-1][: lengths[0]] = rows[0][: lengths[0]]
        rows = [row.to(model.device) for row in rows]
        whole = [last_logits(model, row, _STEPS + 1) for row in rows]
        prompts = Ragged.from_rows([row[:-_STEPS].cpu() for row in rows], torch.int64)
        running = decoder(model, prompts, _STEPS, pad_token_id)
        alive = list(range(len(rows)))
        for step in range(_STEPS + 1):
            if step == 0:
                logits = running.prefill()
            else:
                logits = running.step(torch.stack([rows[index][lengths[index] + step - 1] for index in alive]))
            gaps += [relative_gap(scores, whole[index][step]) for index, scores in zip(alive, logits, strict=True)]
            if step == 1:  # a row ends
                alive = alive[1:]
                running.keep(torch.arange(1, len(rows), device=model.device))
    return torch.stack(gaps).max().nan_to_num(float("inf")).item()


def _trial_lengths(model: PreTrainedModel, max_length: int | None, *, equal: bool) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of the prompts of each trial batch, all equal if `equal`.

    Some rows pass each threshold in the prompt and some in a decoding step, because a cache may drop keys that a window
    hides too early or too late.
    """
    limits = [size for _, size in frequency_limits(model.config)]
    most = min([longest_row(model), max_length or longest_row(model), *limits]) - _STEPS
    slots = affordable_slots(model) // 4
    batches = [(5, 5), (12, 12), (30, 30)] if equal else [_SHORT] * (2 if slots > max(_SHORT) else 1)
    longest = min(most, max(_MAX_THRESHOLD, min(slots, _MAX_SMALL_THRESHOLD)))
    thresholds = [size for size in length_thresholds(model) if max(_SHORT) - 6 < size <= longest]
    for size in thresholds[-_MOST_THRESHOLDS:]:
        batches += [(size - 2, size - 2), (size + 6, size + 6)] if equal else [(4, size - 2, size + 6)]
    if slots > max(_SHORT):
        long = min(_LONG_RECURRENT if model._is_stateful else _LONG, slots)
        batches += [(long, long)] if equal else [(4, long // 3, long)]
    yield from (tuple(max(1, min(length, most)) for length in lengths) for lengths in batches)

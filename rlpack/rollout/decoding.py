"""How the `hf` engine runs a model token by token: the fastest of five ways that is exact for the model.

| decoder | rows that run together | cost of a token |
|---|---|---|
| `DirectDecoder` | prompts of any lengths, padded on the left | one column, without transformers' modules |
| `PreparedMaskDecoder` | the same | one column |
| `PaddedDecoder` | the same; the model builds its masks | one column, and masks |
| `EqualLengthDecoder` | prompts of one length | one column |
| `RecomputingDecoder` | prompts of any lengths | the whole row |

Recurrent layers would treat left padding as tokens, and some models ignore masks or positions. Such a model would
silently sample from a different distribution than the one being trained. Each decoder is therefore compared with
forward passes over whole rows, without a cache.
"""

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.batch.ragged import Ragged
from rlpack.models.check_rows import affordable_slots
from rlpack.models.checks import has_experts
from rlpack.models.length_thresholds import length_thresholds, longest_row, selections
from rlpack.models.rope import frequency_limits
from rlpack.rollout.decoders import (
    Decoder,
    EqualLengthDecoder,
    PaddedDecoder,
    PreparedMaskDecoder,
    RecomputingDecoder,
)
from rlpack.rollout.direct_decoder import DirectDecoder
from rlpack.rollout.errors import EngineError
from rlpack.rollout.known_layers import unknown_part
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
# Trials of a model that selects experts or keys. Rounding decides between two that score equally. With experts this is
# rare, so one trial has to pass. With keys all trials have to, because a model with many ties has no exact log-probs.
_DRAWS = 3


DECODERS: tuple[type[Decoder], ...] = (
    DirectDecoder,
    PreparedMaskDecoder,
    PaddedDecoder,
    EqualLengthDecoder,
    RecomputingDecoder,
)
# Decoders that only save time: `PaddedDecoder` gives the same result, or an error that says why it can't.
_OPTIONAL = (DirectDecoder, PreparedMaskDecoder)


@torch.inference_mode()
def choose_decoder(model: PreTrainedModel, pad_token_id: int, *, max_length: int | None = None) -> type[Decoder]:
    """Return the first decoder whose logits equal those of whole rows.

    Args:
        model: in evaluation mode, with the attention that generates.
        pad_token_id: the engine's padding token.
        max_length: tokens of the longest row that will be generated; None if not known.

    Raises:
        EngineError: none is exact; the message says why for each.
    """
    reasons: list[str] = []
    unknown = unknown_part(model)
    for decoder in DECODERS:
        if decoder is DirectDecoder and unknown and len(DECODERS) > 1:
            _log.debug("%s runs by its own modules: %s", type(model).__name__, unknown)
            continue
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
        if decoder in _OPTIONAL:
            _log.debug("%s can't generate by %s: %s", type(model).__name__, decoder.__name__, reason)
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

"""Checks of a role's model at the start of every rank: its rows are independent, causal, and scored as by transformers.

A model that breaks one of these trains without an error and learns the wrong thing. `check_model` runs before the model
is sharded, in the precision of its weights. It compares rows, laid out as the role's batching lays them out, with each
row alone under transformers' eager attention. `check_isolation` runs after sharding, with the kernels and in the
precision of training, and compares the model with itself.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.models.attention import causal_mask
from rlpack.models.check_rows import MAX_MASK_LENGTH, draw_rows, longest_row, windows
from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.inputs import ModelInputs, pack_rows, pad_rows
from rlpack.models.own_attention import REFERENCE, attention_implementation, layer_masks
from rlpack.models.packed import PackedModel, language_model

# The row that is replaced to see whether others change.
_PERTURBED = 1

# Allowed rounding differences, relative to the largest output; a leak, a lost mask or a wrong position is orders of
# magnitude larger. The first are for `check_model`, the second for `check_isolation`.
_MODEL_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# Where experts are routed, the other rows change how many rows a matrix product has, and so its rounding.
_ROUTED_TOLERANCE = 1e-4
# A tie between two experts may fall either way; it doesn't in every draw.
_ROUTED_DRAWS = 3


@torch.no_grad()
def check_model(
    model: PackedModel,
    device: torch.device | str,
    vocab_size: int,
    *,
    role: str = "actor",
    packed: bool = True,
    longest: int | None = None,
) -> None:
    """Raise unless the model gives the outputs of transformers' own forward pass, whatever other rows are in the batch.

    Call it before the model is sharded. Tokens come from fixed seeds, so every run and every rank checks the same.

    These properties are checked, in this order:
    1. Replacing one of three rows changes its own outputs, and those of no other row.
    2. Replacing the last token of a row changes no output before it.
    3. Each row has the outputs of the wrapped model's own forward pass under eager attention, row by row.
    4. Leaving out the last third of a row changes no output before it.
    5. If packed: the masks that transformers builds for each layer equal those that packed attention applies.

    Args:
        model: unsharded, on `device`; its training mode is restored.
        device: the model's device.
        vocab_size: tokens are drawn below it.
        role: the model's role, for the error.
        packed: whether the role packs rows into one, or pads them.
        longest: tokens of the longest row of the run; a window longer than that has no effect. None if not known.

    Raises:
        IsolationError: packed rows see each other; padded rows may not.
        ModelError: another property fails, or the model can't be run this way; the message names the property.
    """
    with _evaluating(model), _named(model, role, packed):
        routed = has_experts(model.model)
        draws = _ROUTED_DRAWS if routed else 1
        for draw in range(draws):
            rows = draw_rows(model.model, vocab_size, seed=20240607 + draw, longest=longest)
            try:
                _check_rows(model, rows, vocab_size, device, packed=packed, routed=routed)
                break
            except (ModelError, IsolationError):
                if draw + 1 == draws:
                    raise
        if packed:
            _check_masks(model, vocab_size, device, longest)


@torch.no_grad()
def check_isolation(
    model: PackedModel,
    device: torch.device | str,
    vocab_size: int,
    *,
    role: str = "actor",
    packed: bool = True,
    longest: int | None = None,
) -> None:
    """Raise unless the model's outputs in its compute dtype are the same in any layout; a collective if sharded.

    Three rows are laid out together, then the middle one is replaced: its own outputs must change, or the check would
    prove nothing, and those of the others must stay equal. Then each row by itself must give the same outputs up to
    rounding.

    Args:
        model: as it will run; its training mode is restored.
        device: the model's device.
        vocab_size: tokens are drawn below it.
        role: the model's role, for the error.
        packed: whether the role packs rows into one, or pads them.
        longest: tokens of the longest row of the run, None if not known.

    Raises:
        IsolationError: packed rows see each other.
        ModelError: outputs depend on the layout in another way, or aren't finite.
    """
    with _evaluating(model), _named(model, role, packed):
        routed = has_experts(model.model)
        # In bf16 single tokens change experts: a leak changes most tokens of a row, and so the median.
        measure = _median_difference if routed and model.compute_dtype in _HALF else _max_difference
        rows = draw_rows(model.model, vocab_size, seed=20240607, longest=longest)
        together = _check_independence(model, rows, vocab_size, device, packed=packed, routed=routed, measure=measure)
        tolerance = _TOLERANCE[model.compute_dtype]
        for index, (row, scores) in enumerate(zip(rows, together, strict=True)):
            alone = _outputs(model, [row], device, packed=packed)[0]
            _check_equal(measure(scores, alone) / _scale(alone), tolerance, index, _layout(packed), "alone")


@torch.no_grad()
def check_scores(
    classifier: PreTrainedModel, model: ScalarHeadModel, vocab_size: int, *, packed: bool, longest: int | None = None
) -> None:
    """Raise unless a reward model gives the score of the classifier that it was made from; before sharding.

    Args:
        classifier: the sequence classifier.
        model: its language model and head.
        vocab_size: tokens are drawn below it.
        packed: whether the role packs rows into one, or pads them.
        longest: tokens of the longest row of the run, None if not known.

    Raises:
        ModelError: the scores differ, for example because the classifier's head has more operations.
    """
    device = classifier.device
    with _evaluating(model), _named(model, "reward_model", packed):
        rows = draw_rows(model.model, vocab_size, seed=20240608, longest=longest)
        pad = classifier.config.get_text_config().to_dict().get("pad_token_id")
        for row in rows:
            if row[-1] == pad:  # the classifier would read its score at another token
                row[-1] = (row[-1] + 1) % vocab_size
        scores = model(_lay_out(rows, packed=packed).to(device), before_token=False).cpu()
        last = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
        for index, (row, score) in enumerate(zip(rows, scores[last], strict=True)):
            with attention_implementation(classifier, REFERENCE):
                expected = classifier(input_ids=row.to(device)[None], use_cache=False).logits.flatten().cpu()
            gap = _max_difference(score, expected) / max(1.0, expected.abs().max().item())
            _check_equal(gap, _tolerance(model), index, _layout(packed), "by the classifier")


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether tokens are routed to experts."""
    names = {type(module).__name__.lower() for module in model.modules()}
    return any(re.search(r"expert|router|moe|sparsemoe", name) for name in names)


def _check_rows(
    model: PackedModel, rows: list[Tensor], vocab_size: int, device: torch.device | str, *, packed: bool, routed: bool
) -> None:
    """Check one draw of rows: independence, causality, and equality with each row alone."""
    together = _check_independence(
        model, rows, vocab_size, device, packed=packed, routed=routed, measure=_max_difference
    )
    replaced = [torch.cat([row[:-1], (row[-1:] + 1) % vocab_size]) for row in rows]
    _check_causality(model, together, replaced, device, packed=packed, change="replacing its last token")
    for index, (row, scores) in enumerate(zip(rows, together, strict=True)):
        with attention_implementation(model.model, REFERENCE):
            expected = model.probe_wrapped_model(row.to(device)).cpu()
        gap = _max_difference(scores, expected) / _scale(expected)
        tolerance = _tolerance(model)
        if not gap <= tolerance:
            _check_head(model, row, scores, index, device)
        _check_equal(gap, tolerance, index, _layout(packed), "alone under transformers' eager attention")
    shortened = [row[: -(row.shape[0] // 3 + 1)] for row in rows]
    _check_causality(model, together, shortened, device, packed=packed, change="leaving out its last third")


def _check_head(model: PackedModel, row: Tensor, scores: Tensor, index: int, device: torch.device | str) -> None:
    """Raise if a row scores alone as it does here, so that only the model's own output layer differs."""
    with attention_implementation(model.model, REFERENCE):
        alone = _outputs(model, [row], device, packed=False)[0]
    if _max_difference(scores, alone) / _scale(alone) <= _tolerance(model):
        raise ModelError(
            f"the model's own output layer has further operations (a transform, a scale, a cap): row {index} scores "
            "differently through it than through its last linear layer alone"
        )


def _check_causality(
    model: PackedModel,
    together: list[Tensor],
    changed: list[Tensor],
    device: torch.device | str,
    *,
    packed: bool,
    change: str,
) -> None:
    """Raise if a change to the ends of the rows changed outputs before them."""
    tolerance = _tolerance(model)
    for index, (before, after) in enumerate(
        zip(together, _outputs(model, changed, device, packed=packed), strict=True)
    ):
        length = min(before.shape[0] - 1, after.shape[0])
        gap = _max_difference(before[:length], after[:length]) / _scale(before)
        if not gap <= tolerance:
            raise ModelError(
                f"{change} changed earlier outputs of row {index} by {gap:.2e}, so the model is not causal; choose a "
                "causal language model, or set is_decoder=true in its config where it has that key"
            )


def _check_independence(
    model: PackedModel,
    rows: list[Tensor],
    vocab_size: int,
    device: torch.device | str,
    *,
    packed: bool,
    routed: bool,
    measure: Callable[[Tensor, Tensor], float],
) -> list[Tensor]:
    """Return the outputs of `rows`; raise if replacing one changed another, or did not change itself."""
    changed = list(rows)
    step = 1 + torch.arange(rows[_PERTURBED].shape[0]) % max(1, vocab_size - 1)
    changed[_PERTURBED] = (rows[_PERTURBED] + step) % vocab_size
    before, after = (_outputs(model, sequences, device, packed=packed) for sequences in (rows, changed))
    if not all(bool(outputs.isfinite().all()) for outputs in before):
        raise ModelError("outputs are not finite")
    moved = [measure(old, new) for old, new in zip(before, after, strict=True)]
    if not moved[_PERTURBED] > 0:
        raise ModelError("replacing a row did not change its own outputs, so nothing can be checked")
    half = _TOLERANCE[model.compute_dtype] if model.compute_dtype in _HALF else _ROUTED_TOLERANCE
    for row, distance in enumerate(moved):
        allowed = half * _scale(before[row]) if routed else 0.0
        if row != _PERTURBED and not distance <= allowed:
            raise IsolationError(
                f"{_layout(packed)} row {row} changed by {distance:.2e} when row {_PERTURBED} was replaced, so rows "
                "see each other"
            )
    return before


def _check_masks(model: PackedModel, vocab_size: int, device: torch.device | str, longest: int | None) -> None:
    """Raise if a layer's mask under transformers differs from the one that packed attention applies.

    Rows as long as the model's longest window are too long to attend here; their masks are not.
    """
    sizes = windows(model.model)
    if not sizes:
        return
    length = min(max(sizes) + 8, MAX_MASK_LENGTH, longest_row(model.model), longest or MAX_MASK_LENGTH)
    row = torch.arange(length, device=device) % vocab_size
    for mask in layer_masks(model.model, lambda: language_model(model.model)(input_ids=row[None], use_cache=False)):
        expected = causal_mask(length, mask.window, row.device)
        if mask.allowed is not None and not torch.equal(mask.allowed.to(row.device), expected):
            query = int((mask.allowed.to(row.device) != expected).any(1).nonzero()[0])
            raise ModelError(
                f"{mask.layer} masks a row of {length} tokens in another way than packed attention would, first at "
                f"token {query} (transformers lets it see {int(mask.allowed[query].sum())} tokens, packed attention "
                f"{int(expected[query].sum())})"
            )


def _outputs(model: PackedModel, rows: list[Tensor], device: torch.device | str, *, packed: bool) -> list[Tensor]:
    """Return the probe of each row, computed together."""
    outputs = model.probe(_lay_out(rows, packed=packed).to(device)).cpu()
    return list(outputs.split([row.shape[0] for row in rows]))


def _lay_out(rows: list[Tensor], *, packed: bool) -> ModelInputs:
    return pack_rows(rows) if packed else pad_rows(rows)


def _check_equal(gap: float, tolerance: float, row: int, layout: str, other: str) -> None:
    """Raise if outputs differ by more than rounding."""
    if not gap <= tolerance:
        raise ModelError(f"row {row} differs by {gap:.2e} between {layout} and {other} (at most {tolerance:.0e})")


_HALF = {torch.bfloat16, torch.float16}


def _tolerance(model: PackedModel) -> float:
    """Return the allowed difference from transformers' own forward pass, in units of `_scale`.

    Rounding errors add up over layers: 1e-6 after 2 layers, 2e-5 after 48 with large random weights, in fp32.
    """
    layers = model.model.config.get_text_config().to_dict().get("num_hidden_layers") or 1
    return _MODEL_TOLERANCE[model.compute_dtype] * max(1.0, layers / 8)


def _scale(outputs: Tensor) -> float:
    """Return the unit of differences: the largest log-prob [T] or entry of hidden states [T, d], at least 1.

    Rounding grows with the logits, and so with the largest log-prob.
    """
    return max(1.0, outputs.abs().max().item())


def _max_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference; NaN if any is NaN."""
    return (left.double() - right.double()).abs().max().item() if left.numel() else 0.0


def _median_difference(left: Tensor, right: Tensor) -> float:
    """Return the median over tokens of the largest absolute difference of each."""
    gaps = (left.double() - right.double()).abs()
    return (gaps if gaps.ndim == 1 else gaps.amax(1)).median().item()


@contextmanager
def _evaluating(model: PackedModel) -> Iterator[None]:
    """Run the model in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _named(model: PackedModel, role: str, packed: bool) -> Iterator[None]:
    """Add the model's name and the way out to errors; failures inside the model become model errors."""
    name = type(model.model).__name__
    batching = "batching" if role == "actor" else f"{role}.batching"
    skip = f"{role}.isolation_check=false skips this check"
    try:
        yield
    except IsolationError as error:
        advice = f"set {batching}.mode=dynamic or fixed, or use another model" if packed else "use another model"
        raise IsolationError(f"{name}: {error}; {advice} ({skip})") from None
    except ModelError as error:
        raise ModelError(f"{name} can't be run {_layout(packed)} as the {role}: {error}; {skip}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # architectures fail in their own ways
        raise ModelError(
            f"{name} can't be run {_layout(packed)} as the {role}: {type(error).__name__}: {error}; "
            + (f"set {batching}.mode=dynamic or fixed, or use another model" if packed else "use another model")
        ) from error


def _layout(packed: bool) -> str:
    return "packed" if packed else "padded"

"""Checks of a role's model at the start of every rank: its rows are independent, causal, and scored as by transformers.

A model that violates one of these would train without an error, but learn the wrong thing. `check_model` runs in the
precision of the weights: before the model is sharded, or after if no rank holds it whole. It compares rows, laid out as
the role's batching lays them out, with each row alone under transformers' eager attention. `check_isolation` runs after
sharding, with the kernels and in the precision of training, and compares the model with itself.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.models.check_gradients import check_gradients
from rlpack.models.check_masks import check_masks
from rlpack.models.check_outputs import (
    lay_out,
    layout_name,
    max_difference,
    median_difference,
    scale,
    score_alone,
    score_together,
    tolerance,
)
from rlpack.models.check_rows import RowLimits, draw_rows, full_microbatches, gradient_rows, random_rows
from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.own_attention import REFERENCE, attention_implementation
from rlpack.models.packed import PackedModel
from rlpack.models.parts import forward_device

# Seed of the first draw of tokens.
_SEED = 20240607
# Tokens of the row that has to run alone.
_SHORT = 8
# The row that is replaced to see whether others change.
_PERTURBED = 1

# Allowed rounding differences of `check_isolation`, relative to the largest output.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_HALF = {torch.bfloat16, torch.float16}
# With routed experts, other rows change the number of rows in a matrix product, and thus its rounding.
_ROUTED_TOLERANCE = 1e-4
# Rounding may decide a tie between two experts differently, but ties don't occur in every draw.
_ROUTED_DRAWS, _MANY_ROUTED_DRAWS = 3, 6


@torch.no_grad()
def check_model(
    model: PackedModel,
    device: torch.device | str,
    vocab_size: int,
    *,
    role: str = "actor",
    packed: bool = True,
    limits: RowLimits | None = None,
    trained: bool = True,
) -> None:
    """Raise unless a row's outputs match transformers' own forward pass, regardless of the other rows in the batch.

    Call it after `checkpoint_activations`. Tokens come from fixed seeds, so every run and every rank checks the same. A
    collective if the model is sharded.

    These properties are checked, in this order:
    1. Replacing one of three rows changes its own outputs, and those of no other row.
    2. Replacing the last token of a row changes no output before it.
    3. Each row has the outputs of the wrapped model's own forward pass under eager attention, row by row.
    4. Leaving out the last third of a row changes no output before it.
    5. If packed: the masks that transformers builds for each layer equal those that packed attention applies.
    6. 1 and 3 hold in full microbatches, of hundreds of short rows and of long rows, as far as the model's size allows.
    7. If trained: the gradients of rows together are the sum of those of each row alone under eager attention.

    Args:
        model: on `device`, computing in the precision of its weights; its training mode is restored.
        device: the model's device.
        vocab_size: tokens are drawn below it.
        role: the model's role, for the error.
        packed: whether the role packs rows into one, or pads them.
        limits: limits on the role's microbatches; None if not known.
        trained: whether the role has a backward pass.

    Raises:
        IsolationError: packed rows see each other; padded rows may not.
        ModelError: another property fails, or the model can't be run this way; the message names the property.
    """
    limits = limits or RowLimits()
    if packed:  # padding is no remedy for an error that a row alone raises, too
        with _evaluating(model), _named(model, role, packed, ""):
            score_alone(model, random_rows([min(_SHORT, limits.longest or _SHORT)], vocab_size, seed=_SEED), device)
    with _evaluating(model), _named(model, role, packed, limits.way_to_pad(role)):
        routed = has_experts(model.uncut.model)

        def check_three(seed: int) -> None:
            rows = draw_rows(model.model, vocab_size, seed=seed, longest=limits.longest)
            _check_rows(model, rows, vocab_size, device, packed=packed, routed=routed)

        _any_draw(check_three, _ROUTED_DRAWS if routed else 1)
        if packed:
            check_masks(model, vocab_size, device, limits, role=role)
        for lengths in full_microbatches(model.uncut.model, limits, packed=packed):
            _check_full(model, lengths, vocab_size, device, packed=packed, routed=routed)
        if trained:
            lengths = gradient_rows(model.uncut.model, limits)

            def compare_gradients(seed: int) -> None:
                rows = random_rows(lengths, vocab_size, seed=seed)
                check_gradients(model, rows, device, packed=packed, role=role)

            _any_draw(compare_gradients, _MANY_ROUTED_DRAWS if routed else 1)


@torch.no_grad()
def check_isolation(
    model: PackedModel,
    device: torch.device | str,
    vocab_size: int,
    *,
    role: str = "actor",
    packed: bool = True,
    longest: int | None = None,
    padding: str | None = None,
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
        padding: as for `check_scores`.

    Raises:
        IsolationError: packed rows see each other.
        ModelError: outputs depend on the layout in another way, or aren't finite.
    """
    with _evaluating(model), _named(model, role, packed, padding):
        routed = has_experts(model.uncut.model)
        # In bf16 single tokens change experts: a leak changes most tokens of a row, and so the median.
        measure = median_difference if routed and model.compute_dtype in _HALF else max_difference
        rows = draw_rows(model.model, vocab_size, seed=_SEED, longest=longest)
        together = _check_independence(model, rows, vocab_size, device, packed=packed, routed=routed, measure=measure)
        allowed = _TOLERANCE[model.compute_dtype]
        for index, (row, scores) in enumerate(zip(rows, together, strict=True)):
            alone = score_together(model, [row], device, packed=packed)[0]
            _check_equal(measure(scores, alone) / scale(alone), allowed, index, layout_name(packed), "alone")


@torch.no_grad()
def check_scores(
    classifier: PreTrainedModel,
    model: ScalarHeadModel,
    vocab_size: int,
    *,
    packed: bool,
    longest: int | None = None,
    padding: str | None = None,
) -> None:
    """Raise unless a reward model reproduces the scores of the classifier that it was built from.

    Args:
        classifier: the sequence classifier.
        model: its language model and head.
        vocab_size: tokens are drawn below it.
        packed: whether the role packs rows into one, or pads them.
        longest: tokens of the longest row of the run, None if not known.
        padding: the overrides with which the role's rows are padded, for errors; None for a mode of its batching.

    Raises:
        ModelError: the scores differ, for example because the classifier's head has more operations.
    """
    device = forward_device(model)
    with _evaluating(model), _named(model, "reward_model", packed, padding):
        rows = draw_rows(model.model, vocab_size, seed=20240608, longest=longest)
        pad = classifier.config.get_text_config().to_dict().get("pad_token_id")
        for row in rows:
            if row[-1] == pad:  # the classifier would read its score at another token
                row[-1] = (row[-1] + 1) % vocab_size
        scores = model(lay_out(rows, packed=packed).to(device), before_token=False).cpu()
        last = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
        wrapped = classifier if model.has_outputs else model.model
        for index, (row, score) in enumerate(zip(rows, scores[last], strict=True)):
            with attention_implementation(wrapped, REFERENCE):
                outputs = model.run(lambda row=row: wrapped(input_ids=row.to(device)[None], use_cache=False))
            if not model.has_outputs:
                continue
            expected = outputs.logits.flatten().cpu()
            gap = max_difference(score, expected) / max(1.0, expected.abs().max().item())
            _check_equal(gap, tolerance(model), index, layout_name(packed), "by the classifier")


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether tokens are routed to experts, by the model's modules: configs name experts in many ways."""
    names = {type(module).__name__.lower() for module in model.modules()}
    return any(re.search(r"expert|router|moe|sparsemoe", name) for name in names)


def _check_rows(
    model: PackedModel, rows: list[Tensor], vocab_size: int, device: torch.device | str, *, packed: bool, routed: bool
) -> None:
    """Check one draw of rows: independence, causality, and equality with each row alone."""
    together = _check_independence(
        model, rows, vocab_size, device, packed=packed, routed=routed, measure=max_difference
    )
    replaced = [torch.cat([row[:-1], (row[-1:] + 1) % vocab_size]) for row in rows]
    _check_causality(model, together, replaced, device, packed=packed, change="replacing its last token")
    allowed = tolerance(model)
    for index, (row, scores) in enumerate(zip(rows, together, strict=True)):
        (expected,) = score_alone(model, [row], device)
        gap = max_difference(scores, expected) / scale(expected)
        if not gap <= allowed:
            _check_head(model, row, scores, index, device)
        _check_equal(gap, allowed, index, layout_name(packed), "alone under transformers' eager attention")
    shortened = [row[: -(row.shape[0] // 3 + 1)] for row in rows]
    _check_causality(model, together, shortened, device, packed=packed, change="leaving out its last third")


def _any_draw(check: Callable[[int], None], draws: int) -> None:
    """Call `check` with the seed of each draw until it passes; raise the error of the last draw if it never does."""
    for draw in range(draws):
        try:
            check(_SEED + draw)
            return
        except (ModelError, IsolationError):
            if draw + 1 == draws:
                raise


def _check_full(
    model: PackedModel,
    lengths: list[int],
    vocab_size: int,
    device: torch.device | str,
    *,
    packed: bool,
    routed: bool,
) -> None:
    """Check a full microbatch: rows have the outputs that they have alone, and even and odd rows are independent.

    Among many tokens, some are always tied between two experts. With routed experts, an error therefore counts only if
    the same row has one in every draw.
    """
    errors: dict[int, Exception] | None = None
    for draw in range(_MANY_ROUTED_DRAWS if routed else 1):
        rows = random_rows(lengths, vocab_size, seed=_SEED + 100 + draw)
        new = _full_errors(model, rows, vocab_size, device, packed=packed, routed=routed)
        errors = new if errors is None else {row: error for row, error in errors.items() if row in new}
        if not errors:
            return
    assert errors
    raise errors[min(errors)]


def _full_errors(
    model: PackedModel, rows: list[Tensor], vocab_size: int, device: torch.device | str, *, packed: bool, routed: bool
) -> dict[int, Exception]:
    """Return the errors of rows in a full microbatch, by row."""
    together = score_together(model, rows, device, packed=packed)
    size = f"in a microbatch of {len(rows)} rows with {sum(row.shape[0] for row in rows)} tokens"
    errors: dict[int, Exception] = {}
    for index, (scores, expected) in enumerate(zip(together, score_alone(model, rows, device), strict=True)):
        gap = max_difference(scores, expected) / scale(expected)
        if not gap <= tolerance(model):  # rows of equal length may see each other as well: score it by itself
            (expected,) = score_alone(model, rows[index : index + 1], device)
            gap = max_difference(scores, expected) / scale(expected)
        if not gap <= tolerance(model):
            errors[index] = ModelError(
                f"row {index} differs by {gap:.2e} between {layout_name(packed)} and alone under transformers' eager "
                f"attention (at most {tolerance(model):.0e}) {size}"
            )
    for parity in range(2):
        changed = [row if index % 2 == parity else (row + 1) % vocab_size for index, row in enumerate(rows)]
        after = score_together(model, changed, device, packed=packed)
        for index in range(parity, len(rows), 2):
            distance = max_difference(together[index], after[index])
            if not distance <= _allowed_change(model, together[index], routed):
                errors[index] = IsolationError(
                    f"{layout_name(packed)} row {index} changed by {distance:.2e} when its neighbors were replaced "
                    f"{size}, so rows see each other"
                )
    return errors


def _check_head(model: PackedModel, row: Tensor, scores: Tensor, index: int, device: torch.device | str) -> None:
    """Raise if a row scores alone as it does here, so that only the model's own output layer differs."""
    with attention_implementation(model.model, REFERENCE):
        alone = score_together(model, [row], device, packed=False)[0]
    if max_difference(scores, alone) / scale(alone) <= tolerance(model):
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
    allowed = tolerance(model)
    for index, (before, after) in enumerate(
        zip(together, score_together(model, changed, device, packed=packed), strict=True)
    ):
        length = min(before.shape[0] - 1, after.shape[0])
        gap = max_difference(before[:length], after[:length]) / scale(before)
        if not gap <= allowed:
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
    before, after = (score_together(model, sequences, device, packed=packed) for sequences in (rows, changed))
    if not all(bool(outputs.isfinite().all()) for outputs in before):
        raise ModelError("outputs are not finite")
    moved = [measure(old, new) for old, new in zip(before, after, strict=True)]
    if not moved[_PERTURBED] > 0:
        raise ModelError("replacing a row did not change its own outputs, so nothing can be checked")
    for row, distance in enumerate(moved):
        if row != _PERTURBED and not distance <= _allowed_change(model, before[row], routed):
            raise IsolationError(
                f"{layout_name(packed)} row {row} changed by {distance:.2e} when row {_PERTURBED} was replaced, so "
                "rows see each other"
            )
    return before


def _allowed_change(model: PackedModel, outputs: Tensor, routed: bool) -> float:
    """Return by how much a row's outputs may change when other rows are replaced: not at all without experts."""
    if not routed:
        return 0.0
    return scale(outputs) * (_TOLERANCE[model.compute_dtype] if model.compute_dtype in _HALF else _ROUTED_TOLERANCE)


def _check_equal(gap: float, allowed: float, row: int, layout: str, other: str) -> None:
    """Raise if outputs differ by more than rounding."""
    if not gap <= allowed:
        raise ModelError(f"row {row} differs by {gap:.2e} between {layout} and {other} (at most {allowed:.0e})")


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
def _named(model: PackedModel, role: str, packed: bool, padding: str | None) -> Iterator[None]:
    """Add the model's name and a workaround to errors; turn failures inside the model into a `ModelError`."""
    name = type(model.model).__name__
    way = RowLimits(padding=padding).way_to_pad(role) if packed else ""
    pad = f"set {way}, or " if way else ""
    skip = f"{role}.isolation_check=false skips this check"
    try:
        yield
    except IsolationError as error:
        raise IsolationError(f"{name}: {error}; {pad}use another model ({skip})") from None
    except ModelError as error:
        raise ModelError(f"{name} can't be run {layout_name(packed)} as the {role}: {error}; {skip}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # architectures fail in their own ways
        raise ModelError(
            f"{name} can't be run {layout_name(packed)} as the {role}: {type(error).__name__}: {error}; {pad}use "
            "another model"
        ) from error

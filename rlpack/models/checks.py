"""The isolation check: packed sequences must not see each other, and must score as they do unpacked.

A model that leaks trains without an error and learns the wrong thing, so the check runs at the start of every rank.
"""

import torch
from torch import Tensor

from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.inputs import pack_rows
from rlpack.models.packed import PackedModel

# Lengths of the three sequences: uneven, and none a multiple of another.
_LENGTHS = (23, 37, 11)
_PERTURBED = 1

# Allowed rounding differences between packed and unpacked: in nats, or relative to the largest hidden state. A leak or
# a wrong position is orders of magnitude larger.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


@torch.no_grad()
def check_isolation(policy: PackedModel, device: torch.device | str, vocab_size: int, *, role: str = "actor") -> None:
    """Raise unless packing leaves the model's outputs unchanged; a collective if the model is sharded.

    Three sequences are packed, then the middle one is replaced: its own outputs must change, or the check would prove
    nothing, and those of the others must stay bit-equal. Then each sequence by itself must give the same outputs up to
    rounding, through our head and through the wrapped model's. Tokens come from a fixed seed, so every run and every
    rank checks the same.

    Args:
        policy: as it will run; its training mode is restored.
        device: the model's device.
        vocab_size: tokens are drawn below it.
        role: the model's role, for the error.

    Raises:
        IsolationError: which property failed, by how much.
    """
    generator = torch.Generator().manual_seed(20240607)
    rows = [torch.randint(vocab_size, (length,), generator=generator) for length in _LENGTHS]
    changed = list(rows)
    changed[_PERTURBED] = (
        rows[_PERTURBED] + 1 + torch.randint(max(1, vocab_size - 1), rows[_PERTURBED].shape, generator=generator)
    ) % vocab_size
    training = policy.training
    policy.eval()
    try:
        before, after = (_packed_scores(policy, sequences, device) for sequences in (rows, changed))
        _check_independence(before, after)
        _check_unpacked(policy, rows, before, device)
    except ModelError as error:
        raise IsolationError(f"{_name(policy)} can't be run packed: {error}") from error
    except IsolationError as error:
        raise IsolationError(f"{_name(policy)}: {error}; {_remedy(role)}") from None
    finally:
        policy.train(training)


def _check_independence(before: list[Tensor], after: list[Tensor]) -> None:
    """Raise if replacing one sequence changed another, or did not change itself."""
    moved = [_max_difference(old, new) for old, new in zip(before, after, strict=True)]
    if not moved[_PERTURBED] > 0:
        raise IsolationError(
            "replacing a packed sequence did not change its own outputs, so isolation can't be checked"
        )
    for row, distance in enumerate(moved):
        if row != _PERTURBED and distance != 0:
            raise IsolationError(
                f"packed sequence {row} changed by {distance:.2e} when sequence {_PERTURBED} was replaced, so "
                "sequences see each other"
            )


def _check_unpacked(policy: PackedModel, rows: list[Tensor], packed: list[Tensor], device: torch.device | str) -> None:
    """Raise if a sequence scores differently unpacked, through our head or the wrapped model's."""
    for row, (tokens, scores) in enumerate(zip(rows, packed, strict=True)):
        unpacked = _packed_scores(policy, [tokens], device)[0]
        expected = policy.probe_wrapped_model(tokens.to(device)).cpu()
        tolerance = _TOLERANCE[policy.compute_dtype]
        for title, other in (("alone", unpacked), ("through the model's own head", expected)):
            distance = _max_difference(scores, other) / _scale(other)
            if not distance <= tolerance:
                raise IsolationError(
                    f"sequence {row} differs by {distance:.2e} between packed and {title} (at most {tolerance:.0e})"
                )


def _packed_scores(policy: PackedModel, rows: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return the probe of each row, computed packed."""
    scores = policy.probe(pack_rows(rows).to(device)).cpu()
    return list(scores.split([row.shape[0] for row in rows]))


def _scale(probe: Tensor) -> float:
    """Return the unit of differences.

    1 nat for log-probs [T]; the largest entry of hidden states [T, d].
    """
    return 1.0 if probe.ndim == 1 else max(1.0, probe.abs().max().item())


def _max_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference; NaN if any is NaN."""
    return (left.double() - right.double()).abs().max().item()


def _remedy(role: str) -> str:
    """Return what to change in the configuration."""
    batching = "batching" if role == "actor" else f"{role}.batching"
    return f"set {batching}.mode=dynamic or fixed, or use another model ({role}.isolation_check=false skips this check)"


def _name(policy: PackedModel) -> str:
    """Return the model's class name."""
    return type(policy.model).__name__

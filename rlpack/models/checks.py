"""The canary: packed sequences must not see each other, and must score as they do alone.

A model that leaks trains without an error and learns the wrong thing, so this runs once at the start of every rank.
"""

import torch
from torch import Tensor

from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.inputs import pack_rows
from rlpack.models.packed import PackedModel

# Lengths of the three sequences: uneven, and none a multiple of another.
_LENGTHS = (23, 37, 11)
_PERTURBED = 1

# What packing may change by rounding, in nats, or as a part of hidden states; a leak or a wrong position is orders of
# magnitude above.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


@torch.no_grad()
def check_isolation(policy: PackedModel, device: torch.device | str, vocab_size: int, *, role: str = "actor") -> None:
    """Raise unless packing leaves this policy's log-probabilities alone; all ranks of a sharded policy call.

    Three sequences are packed, then the middle one is replaced: nothing may change elsewhere, to the last bit, and it
    must change itself, or the check would see nothing. Then each sequence alone has to give the same up to rounding,
    by our head and by the model's own. The same on every run and every rank: tokens come from a fixed seed.

    Args:
        policy: as it will be trained; its training mode is restored.
        device: where the model is.
        vocab_size: tokens are drawn below it.
        role: whose model it is, for the error.

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
        _check_borders(before, after)
        _check_alone(policy, rows, before, device)
    except ModelError as error:
        raise IsolationError(f"{_name(policy)} can't be run packed: {error}") from error
    except IsolationError as error:
        raise IsolationError(f"{_name(policy)}: {error}; {_remedy(role)}") from None
    finally:
        policy.train(training)


def _check_borders(before: list[Tensor], after: list[Tensor]) -> None:
    """Raise if replacing one sequence moved another, or did not move itself."""
    moved = [_distance(old, new) for old, new in zip(before, after, strict=True)]
    if not moved[_PERTURBED] > 0:
        raise IsolationError("replacing a packed sequence did not change its own log-probs, so nothing can be checked")
    for row, distance in enumerate(moved):
        if row != _PERTURBED and distance != 0:
            raise IsolationError(
                f"packed sequence {row} moved by {distance:.2e} when sequence {_PERTURBED} was replaced, so "
                "sequences see each other"
            )


def _check_alone(policy: PackedModel, rows: list[Tensor], packed: list[Tensor], device: torch.device | str) -> None:
    """Raise if a sequence scores otherwise when it is alone, by our head or by the model's own."""
    for row, (tokens, scores) in enumerate(zip(rows, packed, strict=True)):
        alone = _packed_scores(policy, [tokens], device)[0]
        own = policy.probe_wrapped_model(tokens.to(device)).cpu()
        tolerance = _TOLERANCE[policy.compute_dtype]
        for title, other in (("alone", alone), ("through the model's own head", own)):
            distance = _distance(scores, other) / _unit(other)
            if not distance <= tolerance:
                raise IsolationError(
                    f"sequence {row} scores {distance:.2e} apart packed and {title} (at most {tolerance:.0e})"
                )


def _packed_scores(policy: PackedModel, rows: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return the probe of each row, computed packed."""
    scores = policy.probe(pack_rows(rows).to(device)).cpu()
    return list(scores.split([row.shape[0] for row in rows]))


def _unit(probe: Tensor) -> float:
    """Return what distances are measured in: 1 nat for log-probs, [T]; the largest entry of hidden states, [T, d]."""
    return 1.0 if probe.ndim == 1 else max(1.0, probe.abs().max().item())


def _distance(left: Tensor, right: Tensor) -> float:
    """Return the largest difference; NaN if there is one."""
    return (left.double() - right.double()).abs().max().item()


def _remedy(role: str) -> str:
    """Return what to change in the configuration."""
    batching = "batching" if role == "actor" else f"{role}.batching"
    return f"set {batching}.mode=dynamic or fixed, or use another model ({role}.isolation_check=false skips this check)"


def _name(policy: PackedModel) -> str:
    """Return the model's class name."""
    return type(policy.model).__name__

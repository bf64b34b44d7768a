"""The whole weights of a model that may be sharded."""

from collections.abc import Mapping

from torch import Tensor

from rlpack.models.packed import PackedModel
from rlpack.models.weight_stream import WeightStream, check_weights, copy_weights


def full_state_dict(policy: PackedModel) -> dict[str, Tensor]:
    """Return all weights on the CPU under the wrapped model's own names; a collective if sharded."""
    return {name: weight for bucket in WeightStream(policy) for name, weight in bucket.items()}


def load_full_state_dict(policy: PackedModel, state: Mapping[str, Tensor]) -> None:
    """Check and copy all weights of a model, the same on every rank; no rank communicates with another."""
    check_weights(policy, {name: tuple(weight.shape) for name, weight in state.items()})
    copy_weights(policy, state)

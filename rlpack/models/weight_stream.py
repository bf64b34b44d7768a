"""Weights out of and into a model, one bucket at a time.

Invariants (tests/unit/models/test_weight_stream.py, tests/distributed/models/test_weight_stream.py):

1. every parameter and every buffer of the checkpoint is in exactly one bucket, in the order of `named_parameters`; a
   tied weight comes once, under its first name;
2. a bucket holds at most `bucket_bytes`, or a single tensor that is larger;
3. a rank holds one bucket, and one whole tensor or a few MiB of small ones, at a time, never the whole model; with
   pipeline stages every rank gets each bucket from the stage that has the weights;
4. names and values are those of the model without adapters: W + scale·B·A in place of W; or only the adapters are
   sent, as A and scale·B.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlpack.batch.weight_layout import TensorSpec, WeightLayout
from rlpack.models.adapters import find_adapters, merged_name, peft_name
from rlpack.models.errors import ModelError
from rlpack.models.gather_weights import gather_weights
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard
from rlpack.models.parts import copy_part, local_part, part_offsets, whole_tensor
from rlpack.models.weight_files import WeightFiles

BUCKET_BYTES = 256 * 2**20
# Start of the names of the wrapped model's weights.
_WRAPPED = "model."


class WeightStream:
    """The weights of a model, gathered bucket by bucket; all ranks make one and gather the same buckets.

    >>> for bucket in WeightStream(policy):  # doctest: +SKIP
    ...     engine.load_bucket(bucket)

    Attributes:
        layout: names, shapes and dtypes of all buckets.
    """

    def __init__(
        self,
        policy: PackedModel,
        dtype: torch.dtype | None = None,
        *,
        adapters_only: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Plan the buckets; nothing is gathered yet.

        Args:
            policy: sharded or not; its weights at the time of `gather` are sent.
            dtype: floating-point weights are cast to it, the receiver's; None keeps each weight's own.
            adapters_only: send only the matrices of adapters, under peft's names, each B multiplied by its scale.
            bucket_bytes: largest bucket, in `dtype`.

        Raises:
            ModelError: only adapters are to be sent, and the model has none.
        """
        self._policy = policy
        self._adapters_only = adapters_only
        self._sources: dict[str, str] = {}  # names in the stream to names in the policy
        name_of = peft_name if adapters_only else merged_name
        specs = []
        for source, tensor in _weights(policy.uncut):
            if (name := name_of(source)) is not None:
                cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                specs.append(TensorSpec(name, tuple(tensor.shape), cast))
                self._sources[name] = source
        if adapters_only and not specs:
            raise ModelError("the model has no adapters to send; set actor.lora.rank, or rollout.lora=merged")
        self.layout = WeightLayout(tuple(_buckets(specs, bucket_bytes)))

    def gather(self, index: int, *, keep: bool = True, copy: bool = True) -> dict[str, Tensor]:
        """Return one bucket, whole tensors on the CPU by their names; a collective.

        Args:
            index: of the bucket.
            keep: False on a rank that only takes part in the gathers: it copies nothing and returns nothing.
            copy: False returns the model's tensors themselves where they are already whole, on the CPU and of the
                stream's dtype; read them before the model changes.
        """
        weights, adapters = dict(_weights(self._policy)), find_adapters(self._policy.model)
        scales = {adapter.up: adapter.scale for adapter in adapters.values()} if self._adapters_only else {}
        bucket: dict[str, Tensor] = {}
        specs = [(spec, self._sources[spec.name]) for spec in self.layout.buckets[index]]
        own = [source for _, source in specs if _is_own(self._policy, source)]
        gathered = gather_weights([weights[source] for source in own])
        for spec, source in specs:
            whole = next(gathered) if source in own else torch.empty(spec.shape, dtype=spec.dtype)
            if source in own and (adapter := adapters.get(source)) is not None:
                down, up = gather_weights([weights[adapter.down], weights[adapter.up]])
                whole = whole + adapter.scale * (up @ down)
            elif source in own and (scale := scales.get(source)) is not None:
                whole = whole * scale
            if (link := self._policy.stage) is not None:
                whole = link.broadcast(whole.to(spec.dtype), self._policy.stages_of(_WRAPPED + source)[0])
            if keep:
                bucket[spec.name] = whole.to("cpu", spec.dtype, copy=copy)
        return bucket

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield every bucket in order; a collective."""
        return (self.gather(index) for index in range(len(self.layout)))


def head_state_dict(policy: PackedModel) -> dict[str, Tensor]:
    """Return the whole weights outside the wrapped model, such as a value head's, on the CPU; a collective."""
    reshard(policy)
    own, link, state = dict(policy.named_parameters()), policy.stage, {}
    for name, weight in policy.uncut.named_parameters():
        if name.startswith(_WRAPPED):
            continue
        whole = whole_tensor(own[name]) if name in own else torch.empty(weight.shape, dtype=weight.dtype)
        if link is not None:
            whole = link.broadcast(whole, policy.stages_of(name)[0])
        state[name] = whole.to("cpu", copy=True)
    return state


def check_weights(model: PackedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that weights of these names and shapes are all that the model needs.

    Raises:
        ModelError: a weight is missing or has another shape, or a name belongs to no weight.
    """
    weights = dict(_weights(model.uncut))
    # A tied weight may come under each of its names.
    known = {name for name, _ in model.uncut.model.named_parameters(remove_duplicate=False)} | set(weights)
    if missing := sorted(set(weights) - set(shapes)):
        raise ModelError(f"{len(missing)} weights are missing, the first is {missing[0]}; load this model's own state")
    if unknown := sorted(set(shapes) - known):
        raise ModelError(f"{len(unknown)} weights are not the model's, the first is {unknown[0]}; load its own state")
    for name, weight in weights.items():
        if tuple(weight.shape) != tuple(shapes[name]):
            given = f"{list(shapes[name])}, the model's {list(weight.shape)}"
            raise ModelError(f"weight {name} has shape {given}; load this model's own state")


def copy_weights(model: PackedModel, state: Mapping[str, Tensor]) -> None:
    """Copy some whole weights, the same on every rank, into the model; no rank communicates with another.

    A tied weight is copied under its first name; its other names are skipped.
    """
    for name, weight in _weights(model):
        if name in state:
            copy_part(weight, state[name])


def load_folder(policy: PackedModel, folder: Path) -> None:
    """Load all weights from safetensors files with the names of the model's own modules, each rank its part.

    No rank communicates with another.

    Raises:
        ModelError: a weight is missing or has another shape, or a name belongs to no weight.
    """
    files = WeightFiles(sorted(folder.glob("*.safetensors")))
    check_weights(policy, files.shapes)
    for name, weight in _weights(policy):
        if (offsets := part_offsets(weight)) is None:
            copy_part(weight, files.read(name, weight.dtype))
        else:
            files.read_into(name, local_part(weight), offsets)


def base_name(model: PackedModel, name: str) -> str | None:
    """Return the name that a language model's weight has in its base model, None for a weight of its head."""
    prefix = f"{model.model.base_model_prefix}."
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def _weights(policy: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the wrapped model's parameters and the buffers that a checkpoint holds, sharded where the policy is."""
    reshard(policy)
    for name, tensor in policy.stored_tensors():
        if name.startswith(_WRAPPED):
            yield name.removeprefix(_WRAPPED), tensor


def _is_own(policy: PackedModel, name: str) -> bool:
    """Return whether this pipeline stage is the first that has a weight of the wrapped model."""
    return policy.stage is None or policy.stages_of(_WRAPPED + name)[0] == policy.stage.rank


def _buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """Yield runs of tensors of at most `bucket_bytes`; a larger tensor is a run by itself."""
    bucket: list[TensorSpec] = []
    num_bytes = 0
    for spec in specs:
        if bucket and num_bytes + spec.num_bytes > bucket_bytes:
            yield tuple(bucket)
            bucket, num_bytes = [], 0
        bucket.append(spec)
        num_bytes += spec.num_bytes
    if bucket:
        yield tuple(bucket)

"""Gather a model's weights, or copy weights into a model, one bucket at a time.

Invariants (tests/unit/models/test_weight_stream.py, tests/distributed/models/test_weight_stream.py):

1. every parameter and every buffer of the checkpoint is in exactly one bucket, in the order of `named_parameters`; a
   tied weight comes once, under its first name;
2. a bucket holds at most `bucket_bytes`, or a single tensor that is larger;
3. a rank that keeps a bucket holds it once, parameters in the receiver's dtype, and a few pieces of a weight; one that
   doesn't keep it holds only the pieces; with pipeline stages every rank gets each bucket from the stage that has the
   weights;
4. names and values are those of the model without adapters: W + scale·B·A in place of W; or only the adapters are
   sent, as A and scale·B.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlpack.batch.weight_layout import TensorSpec, WeightLayout
from rlpack.models.adapters import Adapter, find_adapters, merged_name, peft_name
from rlpack.models.errors import ModelError
from rlpack.models.gather_weights import gather_pieces, gather_weights, is_large, places_of, weight_cuts
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard
from rlpack.models.parts import copy_part, local_part, part_offsets, whole_tensor
from rlpack.models.weight_files import WeightFiles
from rlpack.models.weight_pieces import Place, place_shape

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
            dtype: floating-point parameters are cast to it, the receiver's; None keeps each weight's own. Buffers, and
                parameters that transformers never casts (`_keep_in_fp32_modules_strict`), stay as they are, because
                models and engines keep them in fp32, such as the biases that choose experts.
            adapters_only: send only the matrices of adapters, under peft's names, each B multiplied by its scale.
            bucket_bytes: largest bucket, in `dtype`.

        Raises:
            ModelError: only adapters are to be sent, and the model has none.
        """
        self._policy = policy
        self._adapters_only = adapters_only
        self._sources: dict[str, str] = {}  # names in the stream to names in the policy
        self._large: set[str] = set()  # of those in the policy, the ones that are gathered in pieces
        name_of = peft_name if adapters_only else merged_name
        uncast = _never_cast(policy.uncut.model)
        specs = []
        for source, tensor in _weights(policy.uncut):
            if (name := name_of(source)) is not None:
                is_cast = tensor.is_floating_point() and source not in uncast
                cast = dtype if dtype is not None and is_cast else tensor.dtype
                specs.append(TensorSpec(name, tuple(tensor.shape), cast))
                self._sources[name] = source
                if is_large(tensor):
                    self._large.add(source)
        if adapters_only and not specs:
            raise ModelError("the model has no adapters to send; set actor.lora.rank, or rollout.lora=merged")
        self.layout = WeightLayout(tuple(_buckets(specs, bucket_bytes)))

    def gather(self, index: int, *, keep: bool = True, copy: bool = True) -> dict[str, Tensor]:
        """Return one bucket, whole tensors on the CPU by their names; a collective.

        Args:
            index: index of the bucket.
            keep: False on a rank that only takes part in the gathers: it copies nothing and returns nothing.
            copy: False returns the model's tensors themselves where they are already whole, on the CPU and of the
                stream's dtype; read them before the model changes.
        """
        bucket: dict[str, Tensor] = {}
        for spec, place, values in self.pieces(index):
            if not keep:
                continue
            if not place:
                bucket[spec.name] = values.to("cpu", spec.dtype, copy=copy)
                continue
            if spec.name not in bucket:
                bucket[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
            bucket[spec.name][place].copy_(values)
        return bucket

    def pieces(self, index: int) -> Iterator[tuple[TensorSpec, Place, Tensor]]:
        """Yield the tensors of one bucket, large ones in pieces, with the place of each; a collective at every step.

        All ranks have to take all pieces. They are on the device of the weights, not always in the stream's dtype.
        Copy each before the next, which may overwrite it.
        """
        weights, adapters = dict(_weights(self._policy)), find_adapters(self._policy.model)
        link = self._policy.stage
        specs = [(spec, self._sources[spec.name]) for spec in self.layout.buckets[index]]
        own = {source for _, source in specs if _is_own(self._policy, source)}
        # A weight of this rank alone is read where it is, unless adapters are added to it.
        in_pieces = {
            source
            for source in self._large.intersection(source for _, source in specs)
            if link is not None or source in adapters or isinstance(weights[source], DTensor)
        }
        whole = gather_weights([weights[each] for _, each in specs if each in own and each not in in_pieces])
        for spec, source in specs:
            if source in in_pieces:
                parts = self._pieces_of(spec, source, weights)
            else:
                parts = iter([((), next(whole) if source in own else torch.empty(spec.shape, dtype=spec.dtype))])
            for place, values in self._merged(source, parts, weights, adapters) if source in own else parts:
                if link is not None:
                    values = link.broadcast(values.to(spec.dtype), self._policy.stages_of(_WRAPPED + source)[0])
                yield spec, place, values

    def _pieces_of(
        self, spec: TensorSpec, source: str, weights: Mapping[str, Tensor]
    ) -> Iterator[tuple[Place, Tensor]]:
        """Yield the pieces of a large weight; on other stages than its own, empty tensors of the same shapes."""
        link = self._policy.stage
        if link is None:
            yield from gather_pieces(weights[source])
            return
        stage, cuts = self._policy.stages_of(_WRAPPED + source)[0], None
        if stage == link.rank:
            cuts = weights[source].itemsize, weight_cuts(weights[source])
        itemsize, cuts = link.gather(cuts)[stage]
        if stage == link.rank:
            yield from gather_pieces(weights[source])
            return
        for place in places_of(spec.shape, itemsize, cuts):
            yield place, torch.empty(place_shape(spec.shape, place), dtype=spec.dtype)

    def _merged(
        self,
        source: str,
        parts: Iterator[tuple[Place, Tensor]],
        weights: Mapping[str, Tensor],
        adapters: Mapping[str, Adapter],
    ) -> Iterator[tuple[Place, Tensor]]:
        """Yield parts of a weight with what the stream adds to it: the adapter's product, or an adapter's scale."""
        if (adapter := adapters.get(source)) is not None:
            down, up = gather_weights([weights[adapter.down], weights[adapter.up]])
            for place, values in parts:
                yield place, values + adapter.scale * (up[place[:1]] @ down[(slice(None), *place[1:])])
        elif self._adapters_only and (scales := [each.scale for each in adapters.values() if each.up == source]):
            yield from ((place, values * scales[0]) for place, values in parts)
        else:
            yield from parts

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


def _never_cast(model: nn.Module) -> set[str]:
    """Return the names of a model's buffers, and of the parameters that transformers keeps in fp32 in every dtype."""
    kept = {
        name
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for name in module._keep_in_fp32_modules_strict or ()
    }
    # Matched as transformers does: whole components of a name.
    pattern = re.compile("|".join(rf"(?:(?:^|\.){name}(?:$|\.))" for name in sorted(kept)) or "(?!)")
    buffers = {name for name, _ in model.named_buffers()}
    return buffers | {name for name, _ in model.named_parameters() if pattern.search(name)}


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

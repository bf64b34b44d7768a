"""Write a sharded model as a Hugging Face folder: each rank writes some files, and no rank gathers the model.

transformers' own code names and converts the weights (`revert_weight_conversion`), first on the meta device: that gives
the names, shapes and files of all tensors. Then the weights are gathered one by one (those that transformers joins,
together), large ones in pieces, and the rank that owns a file writes its tensors into it. Tensors that are parts of a
single weight, such as single experts of stacked ones, are written piece by piece.

Invariants (tests/unit/models/test_model_export.py, tests/distributed/models/test_sharded_export.py):

1. the tensors and the configuration files are those of `save_pretrained`, bit for bit, also with a generation config
   that it refuses to save;
2. the files don't depend on the number of ranks, and each is written by one rank;
3. on top of its shard, a rank holds a few pieces of one weight; only the owner of a file also holds weights that
   transformers joins or computes with, those that it needs together;
4. a rank that can't write takes part in all gathers before it raises, so that no other rank waits for it.
"""

import errno
import json
import logging
import shutil
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from rlpack.batch.weight_layout import TensorSpec
from rlpack.models.errors import ModelError
from rlpack.models.file_names import INDEX, WEIGHTS
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.weight_pieces import Place
from rlpack.models.weight_stream import WeightStream
from rlpack.models.weight_views import WeightView, entry_runs, find_views

_log = logging.getLogger(__name__)

# Small enough that ranks share the work on a large model; a small model is still a single file.
FILE_BYTES = 10**9

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FileLayout:
    """One safetensors file: its header, and where each tensor begins."""

    header: bytes
    offsets: dict[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "FileLayout":
        """Lay tensors out as safetensors does: those of wide dtypes first, then by name."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position, starts = 0, {}
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            tensor = tensors[name]
            if tensor.dtype not in _DTYPES:
                raise ModelError(f"weight {name} is {tensor.dtype}, which safetensors files can't hold")
            starts[name], end = position, position + tensor.numel() * tensor.dtype.itemsize
            shape = list(tensor.shape)
            entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [position, end]}
            position = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        return cls(header, {name: len(header) + start for name, start in starts.items()})


@dataclass(frozen=True)
class ExportPlan:
    """The contents of an export.

    Attributes:
        groups: names of the model's weights that are converted together, in the order in which they are gathered.
        targets: names of the tensors in the files that each group becomes.
        files: layout of each file by its name.
        file_of: file of each tensor.
        index: the index file's contents; None with a single file.
        views: targets of the groups that are one weight, and whose targets are parts of it.
        not_alone: a tensor that would differ if weights were converted group by group, which makes all of them one
            group.
    """

    groups: list[tuple[str, ...]]
    targets: list[frozenset[str]]
    files: dict[str, FileLayout]
    file_of: dict[str, str]
    index: dict[str, object] | None
    views: dict[tuple[str, ...], dict[str, WeightView]] = field(default_factory=dict)
    not_alone: str | None = None


class _OwnFiles:
    """The files that a rank writes. Only `close`, after the last gather, raises an error."""

    def __init__(self, plan: ExportPlan, folder: Path, own: set[str]) -> None:
        self._plan, self._folder = plan, folder
        self._files: dict[str, BinaryIO] = {}
        self._failure: OSError | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in sorted(own):
                self._files[name] = (folder / name).open("wb")
                self._files[name].write(plan.files[name].header)
        except OSError as error:
            self._failure = error

    @property
    def names(self) -> list[str]:
        """Return the names of the files."""
        return list(self._files)

    def needs(self, targets: Iterable[str]) -> bool:
        """Return whether any of these tensors goes into these files; False after an error."""
        return self._failure is None and any(self._plan.file_of[name] in self._files for name in targets)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write those of whole tensors that belong to these files."""
        for name, tensor in tensors.items():
            self.write_part(name, tensor.shape, (), tensor)

    def write_part(self, name: str, shape: Sequence[int], place: Place, values: Tensor) -> None:
        """Write what is in a place of a tensor of this shape, if it belongs to these files."""
        file = self._files.get(self._plan.file_of[name])
        if file is None or self._failure is not None or not values.numel():
            return
        begins, length = entry_runs(shape, place)
        # As bytes, because NumPy doesn't have all dtypes.
        runs = values.to("cpu").contiguous().view(-1).view(torch.uint8).numpy().reshape(len(begins), -1)
        offset = self._plan.files[self._plan.file_of[name]].offsets[name]
        assert runs.shape[1] == length * values.itemsize
        try:
            for begin, run in zip(begins.tolist(), runs, strict=True):
                file.seek(offset + begin * values.itemsize)
                file.write(run.data)
        except OSError as error:
            self._failure = error

    def close(self) -> None:
        """Close the files.

        Raises:
            OSError: a tensor could not be written.
        """
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:
                self._failure = self._failure or error
        if self._failure is not None and self._failure.errno in (errno.ENOSPC, errno.EDQUOT):
            existing = next(path for path in (self._folder, *self._folder.parents) if path.exists())
            free = f", where {shutil.disk_usage(existing).free:,} bytes are free"
            raise OSError(
                f"the model doesn't fit into {self._folder}{free * (self._failure.errno == errno.ENOSPC)} "
                f"({self._failure}); free some space"
            ) from self._failure
        if self._failure is not None:
            raise self._failure


def export_model(
    policy: PackedModel,
    folder: Path,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    published_names: bool = True,
    file_bytes: int = FILE_BYTES,
) -> list[str]:
    """Write config and weights as `save_pretrained` does, the weights from all ranks; a collective.

    Args:
        policy: sharded or not; adapters are merged.
        folder: made if missing.
        rank: this rank.
        num_ranks: ranks that write.
        published_names: False writes weights under the names of the model's own modules, without conversions.
        file_bytes: maximum size of a file, unless a single tensor is larger.

    Raises:
        OSError: a file could not be written.
        ModelError: a weight has a dtype that safetensors files can't hold.

    Returns:
        The names of the weight files that this rank has written.
    """
    stream = WeightStream(policy, bucket_bytes=0)  # one weight in each bucket
    specs = [bucket[0] for bucket in stream.layout.buckets]
    # The model of all stages: `specs` are of all of them, and buffers are told from weights by name.
    plan = plan_export(policy.uncut.model, specs, published_names=published_names, file_bytes=file_bytes)
    places = {spec.name: place for place, spec in enumerate(specs)}
    files = _OwnFiles(plan, folder, {name for number, name in enumerate(plan.files) if number % num_ranks == rank})
    if plan.not_alone is not None and rank == 0 and num_ranks > 1:
        size = sum(spec.num_bytes for spec in specs) / 2**20
        _log.warning(
            "export to %s: every rank that writes a file gathers all %.0f MiB of weights at once, because transformers "
            "makes another %s of %s from its weight alone than from all together",
            folder,
            size,
            plan.not_alone,
            type(policy.model).__name__,
        )
    for group, targets in zip(plan.groups, plan.targets, strict=True):
        keep = files.needs(targets)
        if (views := plan.views.get(group)) is not None:
            for _, place, values in stream.pieces(places[group[0]]):
                if keep:
                    _write_views(files, views, place, values)
            continue
        weights: dict[str, Tensor] = {}
        for name in group:
            weights |= stream.gather(places[name], keep=keep, copy=False)
        if keep:
            files.write(_reverted(policy.model, weights) if published_names else weights)
    files.close()
    if rank == 0:
        _write_config(policy.model, folder)
        if plan.index is not None:
            (folder / INDEX).write_text(json.dumps(plan.index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return files.names


def plan_export(
    model: PreTrainedModel, specs: Iterable[TensorSpec], *, published_names: bool, file_bytes: int
) -> ExportPlan:
    """Return the contents of an export of a model.

    Args:
        model: with the modules of all pipeline stages; only its config, recorded conversions and the names of its
            buffers are read.
        specs: its weights, without adapters; of tied ones only the first.
        published_names: as for `export_model`.
        file_bytes: as for `export_model`.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    state = {
        spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for spec in specs
        if spec.name not in ignored
    }
    tensors = _reverted(model, state) if published_names else state
    groups, not_alone = {(name,): frozenset([name]) for name in state}, None
    if published_names:
        groups, not_alone = _groups(model, state, tensors)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.numel() * tensor.dtype.itemsize,
        filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=file_bytes,
    )
    index = None
    if split.is_sharded:
        buffers = {name for name, _ in model.named_buffers()}
        num_weights = sum(tensor.numel() for name, tensor in state.items() if name not in buffers)
        metadata = {"total_parameters": num_weights, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    files = {
        file: FileLayout.of({name: tensors[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    }
    convert = (lambda weights: _reverted(model, weights)) if published_names else dict
    views = {}
    for group in groups:
        if len(group) == 1:
            found = find_views(state[group[0]], lambda weight, name=group[0]: convert({name: weight}))
            if found is not None and found.keys() == groups[group]:
                views[group] = found
    return ExportPlan(list(groups), list(groups.values()), files, split.tensor_to_filename, index, views, not_alone)


def _groups(
    model: PreTrainedModel, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> tuple[dict[tuple[str, ...], frozenset[str]], str | None]:
    """Return groups of weights that transformers converts independently, and the tensors that each becomes.

    Weights that become the same tensor are in one group; if converting groups differs from converting all weights at
    once, all are in one group, and a tensor that differs is returned, too.
    """
    makers: dict[str, list[str]] = defaultdict(list)
    made = {name: _reverted(model, {name: tensor}) for name, tensor in state.items()}
    for name, parts in made.items():
        for target in parts:
            makers[target].append(name)
    group_of = {name: (name,) for name in state}
    for names in makers.values():
        joined = tuple(dict.fromkeys(member for name in names for member in group_of[name]))
        group_of |= dict.fromkeys(joined, joined)
    groups: dict[tuple[str, ...], frozenset[str]] = {}
    for group in dict.fromkeys(group_of.values()):
        parts = made[group[0]] if len(group) == 1 else _reverted(model, {name: state[name] for name in group})
        for target, tensor in parts.items():
            if target not in tensors or tensors[target].shape != tensor.shape:
                return {tuple(state): frozenset(tensors)}, target
        groups[group] = frozenset(parts)
    if missing := tensors.keys() - frozenset().union(*groups.values()):
        return {tuple(state): frozenset(tensors)}, min(missing)
    return groups, None


def _write_views(files: _OwnFiles, views: Mapping[str, WeightView], place: Place, values: Tensor) -> None:
    """Write the parts of a weight's piece into the tensors that they belong to."""
    for name, view in views.items():
        if (cut := view.cut(place, values)) is not None:
            files.write_part(name, view.shape, *cut)


def _reverted(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the names and in the form in which transformers saves them."""
    prefix, tensors = _needed_prefix(model), revert_weight_conversion(model, dict(state))
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _needed_prefix(model: PreTrainedModel) -> str:
    """Return what the names of a headless model need so that a language model can be loaded from them.

    transformers itself adds the prefix of the language model's class. Llama 4's names no module of it.
    """
    if language_model(model) is not model or type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ""
    kind = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING)[type(model.config)]
    return "" if kind.base_model_prefix == model.base_model_prefix else f"{model.base_model_prefix}."


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write all files that `save_pretrained` writes except weights.

    It deletes other weight files in its folder, so it writes to a temporary one. It refuses generation configs with
    settings that have no effect, as many published models have them, so theirs is written separately.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        generation_config = model.generation_config if model.can_generate() else None
        try:
            if generation_config is not None:
                model.generation_config = GenerationConfig()
            model.save_pretrained(own, state_dict={})
        finally:
            if generation_config is not None:
                model.generation_config = generation_config
        if generation_config is not None:
            # The arguments of `save_pretrained`.
            generation_config.to_json_file(Path(own, GENERATION_CONFIG_NAME), keys_to_pop=["compile_config"])
        for path in Path(own).iterdir():
            path.replace(folder / path.name)

"""The value head in the files of `critic.path`, if they have one."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlpack.config.schema import Model
from rlpack.models.errors import ModelError
from rlpack.models.loading import hub_arguments
from rlpack.models.open_model import weight_paths
from rlpack.models.weight_files import WeightFiles

# File of the head in a critic's export, and the names of its tensors.
FILE, WEIGHT, BIAS = "value_head.safetensors", "head.weight", "head.bias"
# Names of the head of transformers' sequence and token classifiers of decoders.
_CLASSIFIER = "score"


def stored_value_head(model: Model, hidden_size: int, key: str) -> dict[str, Tensor] | None:
    """Return `weight` fp32 [1, d] and `bias` fp32 [1] of a stored value head; None if the files have none.

    It is that of a critic's export, or the head of a classifier with one label, such as a reward model, whose bias is 0
    if the classifier has none.

    Args:
        model: with a path, a folder or a hub name.
        hidden_size: d of the critic.
        key: configuration key of the path, for the error.

    Raises:
        ModelError: an export's head has other shapes, or is damaged.
        OSError: a hub doesn't answer.
    """
    assert model.path is not None, "the head of a stored critic"
    arguments = hub_arguments(model.path, model, key)
    folder = Path(os.path.expanduser(model.path))
    source = str(folder) if folder.exists() else model.path
    path = _head_file(source, arguments)
    if path is not None:
        try:
            head = load_file(path)
        except SafetensorError as error:
            raise ModelError(
                f"{key} is {model.path!r}, whose {FILE} can't be read: {error}; restore the file, or remove it to "
                "start with a new value head"
            ) from error
        shapes = {name: list(tensor.shape) for name, tensor in head.items()}
        if shapes != {WEIGHT: [1, hidden_size], BIAS: [1]}:
            raise ModelError(
                f"{key} is {model.path!r}, whose {FILE} has {shapes} instead of {WEIGHT} [1, {hidden_size}] and {BIAS} "
                "[1]; set the folder of a whole critic, or remove the file to start with a new value head"
            )
        return {"weight": head[WEIGHT].float(), "bias": head[BIAS].float()}
    files = WeightFiles(weight_paths(source, arguments))
    weight, bias = f"{_CLASSIFIER}.weight", f"{_CLASSIFIER}.bias"
    if files.shapes.get(weight) != (1, hidden_size):
        return None
    return {
        "weight": files.read(weight, torch.float32),
        "bias": files.read(bias, torch.float32) if bias in files.shapes else torch.zeros(1),
    }


def save_value_head(head: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tensors of a head into a critic's folder.

    Raises:
        OSError: the file could not be written.
    """
    try:
        save_file(dict(head), folder / FILE)
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"{folder / FILE} can't be written: {error}") from error


def _head_file(source: str, arguments: Mapping[str, Any]) -> Path | None:
    """Return the path of the head's file; None if the folder or the hub's repository has none."""
    if Path(source).is_dir():
        return path if (path := Path(source) / FILE).is_file() else None
    is_local = bool(arguments.get("local_files_only"))
    try:
        return Path(hf_hub_download(source, FILE, revision=arguments["revision"], local_files_only=is_local))
    except LocalEntryNotFoundError:
        if is_local:
            return None
        raise  # the connection was lost, so the repository may have the file
    except EntryNotFoundError:
        return None

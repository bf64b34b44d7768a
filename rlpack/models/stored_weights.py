"""Check that a folder's safetensors files hold the weights of a model, from the files' headers alone.

transformers renames, stacks and splits the tensors of many architectures when it loads them, and only its loader knows
how. The check therefore runs this loader on the meta device, on tensors with the files' names and shapes but no data.
"""

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rlpack.models.errors import ModelError
from rlpack.models.file_names import INDEX, WEIGHTS
from rlpack.models.quantized import dequantizing_arguments
from rlpack.safe_files import read_object

_log = logging.getLogger(__name__)


def check_weight_files(model: PreTrainedModel, source: str, key: str) -> None:
    """Raise if the files of a folder lack weights of a model, or hold them in other shapes.

    This takes milliseconds for any model size. If the source is not a folder, a file can't be read, or transformers'
    loader fails, nothing is raised; the ranks, which load the weights, report such problems.

    Args:
        model: on the meta device, of the class that will be loaded.
        source: the folder, or a hub name.
        key: configuration key of the source, for the error.

    Raises:
        ModelError: gives the number of wrong weights and names the first.
    """
    folder = Path(os.path.expanduser(source))
    shapes = _shapes(folder) if folder.is_dir() else None
    if shapes is None:
        return
    try:
        quantization = dequantizing_arguments(model.config, source)
        built, report = load_on_meta(type(model), copy.deepcopy(model.config), shapes, **quantization)
    except Exception as error:  # noqa: BLE001 - the ranks report failures of the loader
        _log.debug("the weights of %s can't be checked by their headers: %s", source, error)
        return
    check_report(report, built, source, key)


def load_on_meta(
    kind: type[PreTrainedModel], config: PreTrainedConfig, shapes: Mapping[str, Tensor], **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Run transformers' loader on tensors without data; return the model, on the meta device, and the loader's report.

    Args:
        kind: class of the model.
        config: the model keeps a copy.
        shapes: tensors on the meta device by their names in the files.
        options: further arguments of `from_pretrained`.
    """
    with _silent(), torch.random.fork_rng(devices=[]):
        return cast(Any, kind).from_pretrained(
            None,
            config=config,
            state_dict=dict(shapes),
            device_map="meta",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )


def check_report(report: Mapping[str, Any], model: PreTrainedModel, source: str, key: str) -> None:
    """Raise if a report of transformers' loader names missing weights, or weights of other shapes.

    Args:
        report: its loading info.
        model: the model that it loaded.
        source: path or hub name of the model, for the error.
        key: configuration key of the source, for the error.

    Raises:
        ModelError: gives the number of wrong weights and names the first.
    """
    check_missing(report, model, source, key)
    if mismatched := sorted(report["mismatched_keys"]):
        weight, shape, expected = mismatched[0]
        raise ModelError(
            f"{key} is {source!r}, whose files and config.json disagree on the shapes of {len(mismatched)} weights of "
            f"a {type(model).__name__}; the first is {weight}: {list(shape)} instead of {list(expected)}; set a "
            "complete model with its own config.json"
        )


def check_missing(report: Mapping[str, Any], model: PreTrainedModel, source: str, key: str) -> None:
    """Raise if a report of transformers' loader names missing weights that are used; arguments as for `check_report`.

    Raises:
        ModelError: gives the number of missing weights and names the first.
    """
    if missing := sorted(set(report["missing_keys"]) - unused_weights(model, key)):
        raise ModelError(
            f"{key} is {source!r}, whose files lack {len(missing)} weights of a {type(model).__name__}, the first is "
            f"{missing[0]}; they would be random: set a complete model of this kind"
        )


def untie_config(model: PreTrainedModel, source: str) -> None:
    """Set tie_word_embeddings=False if the files hold different values for all weights that the config ties.

    transformers' loader leaves such weights untied, and the config as it is. vLLM would ignore the output layer of a
    model that is exported with it.

    Args:
        model: loaded; weights that are tied are in its `all_tied_weights_keys`.
        source: path or hub name of the model, for the log.
    """
    if model.all_tied_weights_keys or not model.get_expanded_tied_weights_keys(all_submodels=True):
        return
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    _log.warning(
        "%s: config.json ties the output layer to the input embedding, but the files hold different values for them; "
        "they are trained and exported separately, with tie_word_embeddings=false",
        source,
    )


def unused_weights(model: PreTrainedModel, key: str) -> set[str]:
    """Return the names of the weights that no role with this key uses: an output embedding of a critic, if untied."""
    head = model.get_output_embeddings() if key == "critic.path" else None
    weights = set() if head is None else {id(weight) for weight in head.parameters()}
    weights -= {id(weight) for weight in model.get_input_embeddings().parameters()}
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in weights}


def _shapes(folder: Path) -> dict[str, Tensor] | None:
    """Return meta tensors by name, for the files that transformers would load; None if these can't be read."""
    try:
        if (folder / WEIGHTS).is_file():
            names = {WEIGHTS}
        else:
            names = set(map(str, read_object(folder / INDEX)["weight_map"].values()))
        shapes: dict[str, Tensor] = {}
        for name in sorted(names):
            with safe_open(folder / name, framework="pt") as file:
                for tensor in file.keys():  # noqa: SIM118 - not a dict
                    shapes[tensor] = torch.empty(file.get_slice(tensor).get_shape(), device="meta")
    except Exception as error:  # noqa: BLE001 - safetensors raises its own errors, a wrong index many kinds
        _log.debug("the headers in %s can't be read: %s", folder, error)
        return None
    return shapes


@contextmanager
def _silent() -> Iterator[None]:
    """Hide transformers' loading report and progress bar."""
    verbosity, has_bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bar:
            transformers_logging.enable_progress_bar()

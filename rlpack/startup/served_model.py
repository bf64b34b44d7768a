"""What `rlpack serve` serves: a model's folder, a run's exported model, or a model of the Hub."""

from dataclasses import dataclass
from pathlib import Path

from rlpack.checkpoint.publish import MARKER
from rlpack.models.errors import ModelError
from rlpack.observe.run_dir import CHECKPOINTS, MODEL, holds_run
from rlpack.startup.given_model import find_folder
from rlpack.startup.model_files import weight_problems

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class ServedModel:
    """A model to be served.

    Attributes:
        name: the model's name in requests: a folder's, a run's, or that on the Hub.
        path: absolute path of its folder, or its name on the Hub.
        folder: its folder; None for a model of the Hub.
    """

    name: str
    path: str
    folder: Path | None


def find_served_model(given: str) -> ServedModel:
    """Resolve a path or a name.

    Args:
        given: a model's folder, the directory of a run, or a name on the Hub.

    Raises:
        ModelError: there is no such folder, or the folder holds no model that can be served.
    """
    folder = find_folder(given)
    if folder is None:
        return ServedModel(given, given, None)
    resolved = folder.resolve()
    model = resolved
    if holds_run(resolved) and not (resolved / "config.json").is_file():
        model = resolved / MODEL
        if not model.is_dir():
            raise ModelError(
                f"{given!r} is a run without a {MODEL} folder, which a run writes at its end; finish the run with "
                "resume=auto, or give a model's folder"
            )
    if (resolved / MARKER).exists() and not (resolved / "config.json").is_file():  # exported models are marked, too
        raise ModelError(
            f"{given!r} is a checkpoint, whose weights are in parts of ranks; give its run, {_run_of(resolved)}, once "
            f"it has exported its {MODEL} folder"
        )
    if (model / _ADAPTER).is_file() and not (model / "config.json").is_file():
        raise ModelError(f"{given!r} has only adapters; give a folder with the whole model, such as a run's export")
    for problem in weight_problems(model):
        raise ModelError(f"{str(model)!r} can't be served: {problem}; copy or download the folder again")
    return ServedModel(resolved.name, str(model), model)


def _run_of(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint's run."""
    return next((folder.parent for folder in checkpoint.parents if folder.name == CHECKPOINTS), checkpoint.parent)

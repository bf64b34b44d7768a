"""The folder or hub name that comes first on the command lines of `rlpack evaluate` and `rlpack serve`."""

import os
from pathlib import Path

from rlpack.models.errors import ModelError
from rlpack.observe.run_dir import holds_run
from rlpack.path_suggestions import suggest_path
from rlpack.startup.model_files import is_path

_WAYS_OUT = "give a model's folder, the directory of a run, or a hub name"
# Maximum number of folders that an error suggests instead.
_SHOWN = 3


def find_folder(given: str) -> Path | None:
    """Return the folder that a path names; None for a hub name.

    Raises:
        ModelError: there is no such folder, or it holds neither a model nor a run.
    """
    folder = Path(os.path.expanduser(given))
    if not os.path.isdir(folder):
        # A name below an existing folder is also a path, although it has the form of a hub name.
        if is_path(given) or (folder.parent != Path() and folder.parent.is_dir()):
            hint = suggest_path(folder, folders_only=True)
            raise ModelError(f"{given!r} is not a folder{hint}; {_WAYS_OUT}")
        return None
    if not _holds_anything(folder):
        inside = sorted(entry for entry in folder.iterdir() if entry.is_dir() and _holds_anything(entry))
        names = ", ".join(map(str, inside[:_SHOWN])) + ", …" * (len(inside) > _SHOWN)
        way_out = f"give one of the folders in it: {names}" if inside else _WAYS_OUT
        raise ModelError(f"{given!r} holds neither a model (config.json) nor a run (config.yaml); {way_out}")
    return folder


def _holds_anything(folder: Path) -> bool:
    """Return whether a folder has at least one file of a model, of adapters, of a checkpoint or of a run."""
    names = ("config.json", "adapter_config.json", "COMMITTED")
    return holds_run(folder) or any((folder / name).exists() for name in names) or any(folder.glob("*.safetensors"))

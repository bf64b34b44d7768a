"""Folders of models that the configuration names: absolute, because ranks have another working directory."""

import os
from collections.abc import Mapping
from pathlib import Path

from rlpack.config.schema import Config
from rlpack.installation import RAY_JOB

# Keys that name a folder or a model of the Hub, by section.
_NAMES = {"model": {"path", "tokenizer"}, "critic": {"path"}, "reward_model": {"path"}}
KEYS = tuple(f"{section}.{name}" for section, names in _NAMES.items() for name in sorted(names))


def with_absolute_models(config: Config, environment: Mapping[str, str]) -> Config:
    """Return the configuration that ranks get: models and tokenizers that are folders here have absolute paths.

    Ranks on a cluster start in the working directory of Ray, where a relative path names nothing, or is taken for a
    name on the Hub. In a submitted job the paths stay as they are: its ranks start in their node's copy of the uploaded
    files. The driver keeps the paths as given, and so do the run's files: an absolute path in them would be wrong once
    the project's folder is moved, or when a job resumes the run.

    Args:
        config: the configuration.
        environment: the process's environment variables, which say whether this is a submitted job.
    """
    if RAY_JOB in environment:
        return config
    sections = {"model": config.model, "critic": config.critic, "reward_model": config.reward_model}
    changes: dict[str, dict[str, str]] = {}
    for section, settings in sections.items():
        named = {name: path for name, path in settings.model_dump(include=_NAMES[section]).items() if path is not None}
        absolute = {name: _absolute(path) for name, path in named.items()}
        if absolute != named:
            changes[section] = absolute
    return config.model_copy(update={name: sections[name].model_copy(update=paths) for name, paths in changes.items()})


def is_same_model(before: object, now: object) -> bool:
    """Return whether a resumed run loads the model that its checkpoint's configuration names.

    Relative paths start at the working directory. If a stored absolute path no longer exists, its folder was moved, and
    one of the same name is taken for it.
    """
    if not isinstance(before, str) or not isinstance(now, str):
        return before == now
    first, second = Path(_absolute(before)), Path(_absolute(now))
    if first.is_dir() or not (first.is_absolute() and second.is_dir()):
        return first == second or first.resolve() == second.resolve()
    return first.name == second.name


def _absolute(source: str) -> str:
    """Return the absolute path of a folder, without `~`; anything else, such as a name on the Hub, as it is."""
    path = os.path.expanduser(source)
    return os.path.abspath(path) if os.path.isdir(path) else source

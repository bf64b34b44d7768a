"""Compose a config with Hydra: the base node comes from the schema, presets and overrides go on top.

Hydra closes a composed config to unknown keys; mappings in which users choose the names (`roles`, `placement.pools`,
`reward.arguments`, ...) are left open, so that they need no `+`. Errors of Hydra, OmegaConf and YAML become a
`ConfigError` in terms of keys.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlpack.config.errors import ConfigError
from rlpack.config.given_keys import given_key_problems, given_keys
from rlpack.config.keys import Key, children, find, how_to_set, root_key, walk
from rlpack.config.override_hints import comma_problem, how_to_quote
from rlpack.config.recipe_targets import recipe_targets
from rlpack.config.recipes import EVALUATE_TARGET, config_class, sweep_class
from rlpack.config.roles import is_builtin
from rlpack.config.schema import Config, Recipe
from rlpack.config.validate import target_of, unknown_key_problems, validate

BASE_NODE = "schema"
CONFIG_NAME = "train"
EVALUATION_NAME = "evaluate"
PRESETS = Path(__file__).resolve().parents[1] / "configs"
VERSION_BASE = "1.3"
_LONGEST_OVERRIDE = 65_536
# What users want who give a group a name of their own.
_OTHERS = {
    "recipe": "; for a recipe of your own, set recipe.target={}",
    "model": "; for a model's folder or hub name, set model=pretrained model.path={}",
    "data": "; for a file of your own, set data=jsonl or data=parquet, and data.source={}",
    "reward": "; for a reward function of your own, set reward.function={}",
}


def compose(overrides: Sequence[str] = ()) -> Config:
    """Return the validated config that `rlpack train <overrides>` would run, without running it.

    Raises:
        ConfigError: see `rlpack.config.validate.validate`.

    >>> compose(["model=tiny", "trainer.steps=3"]).trainer.steps
    3
    """
    root = register_base(recipe_targets(overrides, [PRESETS]))
    GlobalHydra.instance().clear()
    with (
        config_errors(overrides, root),
        hydra.initialize_config_dir(config_dir=str(PRESETS), job_name=CONFIG_NAME, version_base=VERSION_BASE),
    ):
        composed = plain(hydra.compose(CONFIG_NAME, overrides=list(overrides)), root)
    return _validated(composed, overrides)


def compose_evaluation(overrides: Sequence[str], values: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the validated config of `rlpack evaluate <model> <overrides>`.

    Only held-out prompts are read: both splits are `data.validation_source`, or `data.source` without one.

    Args:
        overrides: Hydra overrides.
        values: sections and top-level values that differ from the schema's defaults, such as those of a run.

    Raises:
        ConfigError: see `rlpack.config.validate.validate`.
    """
    kind = config_class(EVALUATE_TARGET)
    root = root_key(kind)
    ConfigStore.instance().store(name=BASE_NODE, node=base_node(kind, values), provider="rlpack")
    GlobalHydra.instance().clear()
    with (
        config_errors(overrides, root),
        hydra.initialize_config_dir(config_dir=str(PRESETS), job_name=EVALUATION_NAME, version_base=VERSION_BASE),
    ):
        composed = plain(hydra.compose(EVALUATION_NAME, overrides=list(overrides)), root)
    data = composed.get("data")
    if isinstance(data, dict) and isinstance(data.get("source"), str) and data.get("validation_source") != "":
        # The rules refuse "". A subset in `values` is that of their source alone.
        is_other = "data" in values and values["data"]["source"] != data["source"]
        if is_other and "data.subset" not in given_keys(overrides):
            data = {**data, "subset": None}
        composed["data"] = _held_out_alone(data)
    return _validated(composed, overrides)


def _held_out_alone(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section `data` in which the training prompts, too, are the held-out ones."""
    given = data.get("validation_source")
    source = data["source"] if given is None else given
    inherited = data.get("subset") if source == data["source"] else None
    subset = inherited if data.get("validation_subset") is None else data["validation_subset"]
    of_both = {"source": source, "validation_source": source, "subset": subset, "validation_subset": subset}
    return {**data, **of_both, "completion_column": None}


def _validated(composed: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Return the config of a composed mapping.

    Raises:
        ConfigError: it is invalid, or an override sets a key that another key rules out.
    """
    config = validate(composed)
    if problems := list(given_key_problems(config, given_keys(overrides))):
        raise ConfigError(problems)
    return config


def register_base(targets: Sequence[str]) -> Key:
    """Store the defaults of recipes' schemas as Hydra's base node, and return the key that all keys are below.

    Raises:
        ConfigError: a target of `recipe_targets` is not a recipe.
    """
    kind = sweep_class(targets or [Recipe().target])
    ConfigStore.instance().store(name=BASE_NODE, node=base_node(kind), provider="rlpack")
    return root_key(kind)


def base_node(kind: type[Config], given: Mapping[str, Any] | None = None) -> DictConfig:
    """Return every key at its default, or as `given`; mappings in which users choose the names are left open.

    A recipe's own roles are left out, because a sweep's jobs share the node; validation adds them to their job.
    """
    values = kind().model_dump(mode="json") | dict(given or {})
    values["roles"] = {name: role for name, role in values["roles"].items() if is_builtin(name)}
    node = OmegaConf.create({name: _literal(value) for name, value in values.items()})
    for key in walk(root_key(kind)):
        if key.is_open and "<" not in key.path:
            OmegaConf.set_struct(OmegaConf.select(node, key.path), False)
    return node


def _literal(value: Any) -> Any:
    """Escape `${` in the texts of plain values: a default is a value, not an interpolation."""
    if isinstance(value, Mapping):
        return {name: _literal(below) for name, below in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value


def plain(composed: DictConfig, root: Key) -> dict[str, Any]:
    """Return a composed config as nested dicts and lists, interpolations resolved.

    Sections of recipes that only other jobs of a sweep run are left out.

    Raises:
        ConfigError: a value is still missing (`???`), or an interpolation can't be resolved.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        values = None if missing else OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([f"{error.full_key}: {_first_line(error)}"]) from error
    except RecursionError as error:
        raise ConfigError(["an interpolation ${...} refers to itself; give one of its keys a value"]) from error
    if missing:
        raise ConfigError([f"{path} is missing; {how_to_set(path, root)}" for path in missing])
    assert isinstance(values, dict)
    named = {str(name): value for name, value in values.items()}
    of_others = children(root).keys() - config_class(target_of(named)).model_fields.keys()
    return {name: value for name, value in named.items() if name not in of_others}


@contextmanager
def config_errors(overrides: Sequence[str], root: Key, folders: Sequence[Path] = (PRESETS,)) -> Iterator[None]:
    """Turn errors of composing into a `ConfigError` that names the override at fault.

    Args:
        overrides: Hydra overrides as written.
        root: key that all keys are below.
        folders: config directories, whose choices are offered.
    """
    shipped = groups(folders)
    experiments = [
        override.partition("=")[2].strip("[]") for override in overrides if override.startswith("experiment=")
    ]
    if len(experiments) > 1:
        both = f"experiment=[{','.join(experiments)}]"
        raise ConfigError(
            [f"experiment is given {len(experiments)} times, but only the last would count; write {both}"]
        )
    for override in overrides:
        if override.startswith("+") and override[1:].partition("=")[0] in groups():
            raise ConfigError([f"{override} adds a second choice to the group; write {override[1:]}"])
        if len(override) > _LONGEST_OVERRIDE:
            raise ConfigError(
                [
                    f"the override {override[:40]!r}… has {len(override)} characters, over the limit of "
                    f"{_LONGEST_OVERRIDE}; put it into a YAML file and pass --config-dir"
                ]
            )
        name, _, choice = override.partition("=")
        if name in shipped and name != "experiment" and choice.startswith("["):
            raise ConfigError([f"{override} has more than one choice; {name} takes one of: {', '.join(shipped[name])}"])
        if name in shipped and (problems := list(_odd_choice_problems(override, shipped[name]))):
            raise ConfigError(problems)
    try:
        yield
    except (ConfigError, BrokenPipeError):  # the reader of Hydra's output is gone: not an error of the config
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError(list(_diagnose(overrides, error, root, shipped)) or [_whole_text(error)]) from error


def groups(directories: Sequence[Path] = (PRESETS,)) -> Mapping[str, list[str]]:
    """Return the config groups of directories with their choices."""
    present = [directory for directory in directories if directory.is_dir()]
    folders = [path for directory in present for path in directory.iterdir() if path.is_dir()]
    choices: dict[str, set[str]] = {folder.name: set() for folder in sorted(folders, key=lambda folder: folder.name)}
    for folder in folders:
        choices[folder.name].update(path.stem for path in folder.glob("*.yaml"))
    return {name: sorted(stems) for name, stems in choices.items()}


def _diagnose(overrides: Sequence[str], error: Exception, root: Key, choices: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a problem for each override with wrong syntax, an unknown choice or an unknown key."""
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError) as reason:
            problem = f"{text[:40]!r} is not an override; write key=value ({_first_line(reason)[:200]})"
            yield f"{problem}{how_to_quote(text, parser)}"
            continue
        if override.is_choice_sweep() and "Ambiguous value" in str(error) and _is_known(override, root, choices):
            yield comma_problem(override, find(override.key_or_group, root))
        elif override.key_or_group in choices:
            group, value = override.key_or_group, override.value()
            for choice in value if isinstance(value, list) else [value]:
                if choice is None or _is_missing(group, str(choice), error, choices[group]):
                    yield _wrong_choice_problem(group, str(choice or "null"), choices[group])
        elif not override.is_hydra_override() and find(override.key_or_group, root) is None:
            yield from unknown_key_problems(override.key_or_group, override.value(), root)
        elif isinstance(override.value(), list) and f"full_key: {override.key_or_group}\n" in str(error.__cause__):
            key = override.key_or_group
            yield f"{text} is a list, but {key} is a section; set one of its keys: {key}.<key>=<value>"


def _is_known(override: Override, root: Key, choices: Mapping[str, list[str]]) -> bool:
    return override.key_or_group in choices or find(override.key_or_group, root) is not None


def _odd_choice_problems(text: str, choices: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each choice in an override's list that isn't text, for which Hydra raises a `TypeError`."""
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):
        return  # `_diagnose` says why
    value = override.value()
    for choice in value if isinstance(value, list) else []:
        if not isinstance(choice, str):
            yield _wrong_choice_problem(override.key_or_group, "null" if choice is None else str(choice), choices)


def _is_missing(group: str, choice: str, error: Exception, choices: Sequence[str]) -> bool:
    """Return whether the error is that a group lacks the choice; no file can have a name of more than 255 bytes."""
    if isinstance(error, MissingConfigException):
        return f"'{group}/{choice}'" in str(error) and choice not in choices
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG and choice not in choices


def _wrong_choice_problem(group: str, choice: str, choices: Sequence[str]) -> str:
    nearest = get_close_matches(choice.lower(), choices, n=1)
    hint = f"; did you mean {group}={nearest[0]}?" if nearest else ";"
    other = _OTHERS.get(group, "").format(choice if "." in choice or "/" in choice else "…")
    return f"{group}={choice} is not a choice{hint} {group} has: {', '.join(choices)}{other}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()


def _whole_text(error: Exception) -> str:
    """Return the text of the error and of its cause, in which Hydra names the key."""
    texts = [str(error), str(error.__cause__) if error.__cause__ else ""]
    return "\n".join(text.strip() for text in texts if text.strip()) or type(error).__name__

"""Evaluation sets by name: each is the run's configuration with other held-out prompts or another reward."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlpack.config.errors import ConfigError
from rlpack.config.recipes import recipe_of
from rlpack.config.roles import calls_reward_functions, started_roles
from rlpack.config.schema import Config, EvaluationSet

# The column with the set's name in the rows that the reward role scores, where the set has its own reward.
COLUMN = "evaluation_set"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def key_of(name: str) -> str:
    """Return the key of a set."""
    return f"evaluation.sets.{name}"


def set_configs(config: Config) -> dict[str, Config]:
    """Return the configuration of each set by name: the run's, with the set's held-out prompts and reward."""
    return {name: _as_run(config, one) for name, one in config.evaluation.sets.items()}


def _as_run(config: Config, one: EvaluationSet) -> Config:
    given = {"validation_source": one.source, "validation_subset": one.subset, "validation_split": one.split}
    update: dict[str, str | None] = {key: value for key, value in given.items() if value is not None}
    if one.source not in (None, config.data.held_out[0]):  # another dataset than that of data.validation_subset
        update["validation_subset"] = one.subset
    data = config.data.model_copy(update=update)
    reward = config.reward
    if one.reward_function is not None:
        own = {"function": one.reward_function, "arguments": one.reward_arguments, "functions": {}}
        reward = reward.model_copy(update=own)
    return config.model_copy(update={"data": data, "reward": reward})


def reward_functions(config: Config) -> dict[str, str]:
    """Return the reward functions of sets by their keys."""
    sets = config.evaluation.sets.items()
    return {f"{key_of(name)}.reward_function": one.reward_function for name, one in sets if one.reward_function}


def sources(config: Config) -> Mapping[str, str]:
    """Return the sources of sets by their keys."""
    sets = config.evaluation.sets.items()
    return {f"{key_of(name)}.source": one.source for name, one in sets if one.source is not None}


@contextmanager
def naming(config: Config, name: str) -> Iterator[None]:
    """Replace keys of the run by the evaluation set's own in errors that are raised in the context.

    An error that names none of them gets the set's key as a prefix.
    """
    one = config.evaluation.sets[name]
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_with_own_keys(problem, name, one) for problem in error.problems]) from error
    except ValueError as error:
        if len(error.args) != 1:
            raise
        raise type(error)(_with_own_keys(str(error), name, one)) from error


def _with_own_keys(text: str, name: str, one: EvaluationSet) -> str:
    own = {}
    if one.reward_function is not None:
        own = {"reward.function": "reward_function", "reward.arguments": "reward_arguments"}
    own |= {f"data.validation_{key}": key for key in ("source", "subset", "split") if getattr(one, key) is not None}
    renamed = text
    for key, new in own.items():
        renamed = re.sub(rf"\b{re.escape(key)}\b", f"{key_of(name)}.{new}", renamed)
    return renamed if renamed != text else f"{key_of(name)}: {text}"


def evaluation_set_problems(config: Config) -> Iterator[str]:
    """Yield problems across the keys of `evaluation.sets`."""
    for name, one in config.evaluation.sets.items():
        key = key_of(name)
        if not _NAME.fullmatch(name):
            yield (
                f"evaluation.sets holds the name {name!r}; use letters, digits, - and _, starting with a letter, "
                "because it becomes part of metric names"
            )
        if one.source is not None and not one.source.strip():
            yield f"{key}.source is {one.source!r}, which is blank; set it, or null for that of the run"
        if one.reward_function is None:
            if one.reward_arguments:
                yield f"{key}.reward_arguments is set, but {key}.reward_function is null; set both or neither"
        elif not recipe_of(config).generates or "reward" not in started_roles(config):
            yield f"{key}.reward_function is set, but recipe={config.recipe.name} has no reward; leave it out"
        elif not calls_reward_functions(config):
            yield (
                f"{key}.reward_function is set, but roles.reward.target is {config.roles['reward'].target}, which "
                f"scores all rows; leave it out, or let the role read the column {COLUMN}"
            )

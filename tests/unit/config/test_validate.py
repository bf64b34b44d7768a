import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from rlpack.config.errors import ConfigError
from rlpack.config.keys import root_key
from rlpack.config.schema import Config
from rlpack.config.sections.section import Section
from rlpack.config.validate import _without_members, validate

VALID = {"model": {"config": {"model_type": "qwen2"}}}


def problems_of(changes):
    with pytest.raises(ConfigError) as caught:
        validate(VALID | changes)
    return caught.value.problems


def test_a_valid_mapping_becomes_the_config_that_it_describes():
    config = validate(VALID | {"seed": 7, "batching": {"mode": "fixed", "max_tokens": None, "micro_batch_size": 4}})
    assert (config.seed, config.batching.mode, config.batching.max_tokens, config.batching.micro_batch_size) == (
        7,
        "fixed",
        None,
        4,
    )
    assert config.trainer == Config().trainer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"steps": "abc"}}, "trainer.steps is 'abc'; it has to be a whole number"),
        ({"trainer": {"steps": True}}, "trainer.steps is True; it has to be a whole number"),
        ({"trainer": {"steps": 2.5}}, "trainer.steps is 2.5; it has to be a whole number"),
        ({"trainer": {"steps": 1e3}}, "trainer.steps is 1000.0; write it as 1000, without a point or an exponent"),
        ({"batching": {"max_tokens": 1e4}}, "batching.max_tokens is 10000.0; write it as 10000, without a point or"),
        ({"trainer": {"steps": 1e300}}, "trainer.steps is 1e+300; it has to be a whole number"),
        ({"trainer": {"group_size": 2**31}}, "trainer.group_size is 2147483648; it has to be at most 2147483647"),
        ({"sft_warmup": {"batch_size": 10**30}}, "it has to be at most 2147483647"),
        ({"trainer": {"steps": -1}}, "trainer.steps is -1; it has to be at least 0"),
        ({"trainer": {"prompts_per_step": 0}}, "trainer.prompts_per_step is 0; it has to be at least 1"),
        ({"trainer": {"group_size": 0}}, "trainer.group_size is 0; it has to be at least 1"),
        ({"trainer": {"steps": None}}, "trainer.steps can't be null; set trainer.steps=…"),
        ({"trainer": 5}, "trainer is 5; it is a section, not a value; set one of its keys: steps,"),
        ({"seed": 2**63}, "seed is 9223372036854775808; it has to be less than"),
        ({"actor": {"optimizer": {"learning_rate": -1.0}}}, "actor.optimizer.learning_rate is -1.0; it has to be more"),
        ({"actor": {"optimizer": {"learning_rate": float("nan")}}}, "learning_rate is nan; it has to be a finite"),
        ({"actor": {"optimizer": {"learning_rate": float("inf")}}}, "learning_rate is inf; it has to be a finite"),
        ({"actor": {"precision": "half"}}, "actor.precision is 'half'; choose one of fp32, bf16"),
        ({"resume": "auot"}, "resume is 'auot'; did you mean auto? choose one of never, auto"),
        ({"algorithm": {"kl_coef": -0.1}}, "algorithm.kl_coef is -0.1; it has to be at least 0"),
        ({"rollout": {"top_p": 0.0}}, "rollout.top_p is 0.0; it has to be more than 0"),
        ({"rollout": {"top_p": 1.5}}, "rollout.top_p is 1.5; it has to be at most 1"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature is 0; it has to be at least 0.01"),
        ({"rollout": {"temperature": 1e-30}}, "rollout.temperature is 1e-30; it has to be at least 0.01"),
        ({"rollout": {"stop_token_ids": [1, -2]}}, "rollout.stop_token_ids.1 is -2; it has to be at least 0"),
        ({"placement": {"pools": {"main": {"ranks": 0}}}}, "placement.pools.main.ranks is 0; it has to be at least 1"),
        ({"placement": {"call_timeout_s": 0}}, "placement.call_timeout_s is 0; it has to be more than 0"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every is 0; it has to be at least 1"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep is 0; it has to be at least 1"),
        ({"batching": {"max_tokens": 0}}, "batching.max_tokens is 0; it has to be a whole number of at least 1"),
        ({"batching": {"max_tokens": -5}}, "batching.max_tokens is -5"),
        ({"batching": {"micro_batch_size": True}}, "batching.micro_batch_size is True; it has to be a whole number"),
        ({"batching": {"micro_batch_size": "8"}}, "batching.micro_batch_size is '8'; it has to be a whole number"),
        ({"batching": {"algorithm": "best_fit"}}, "choose one of concatenative, first_fit_decreasing,"),
        ({"batching": {"max_tokens": None}}, "batching.mode=packed needs a token budget"),
        ({"batching": {"max_token": 9}}, "did you mean batching.max_tokens? batching has: mode,"),
        ({"batching": [1]}, "batching is [1]; it is a section, not a value"),
        (
            {"reference": {"batching": {"micro_batch_size": 0}}},
            "reference.batching.micro_batch_size is 0; it has to be at least 1",
        ),
        ({"roles": {"judge": {}}}, "roles.judge.target is missing; set roles.judge.target=…"),
        ({"model": {"config": 5}}, "model.config is 5; it has to be a mapping"),
        ({"packing": True}, "packing is not a key"),
        ({"recipe": "x" * 500}, "(502 characters); it is a section, not a value; set one of its keys: target"),
    ],
)
def test_a_wrong_value_is_one_message_with_the_key_the_value_and_what_is_allowed(changes, message):
    assert any(message in problem for problem in problems_of(changes))


REJECT = "algorithm.correction.reject.token_k1"


@pytest.mark.parametrize(
    ("value", "start", "end"),
    [
        ("a", f"{REJECT} is 'a'; it has to be a number", ""),
        (True, f"{REJECT} is True; it has to be a number", ""),
        ([1.0, "a"], f"{REJECT}.1 is 'a'; it has to be a number", ""),
        ([1.0, None], f"{REJECT}.1 can't be null; set {REJECT}.1=…", "[1/u, u])"),
        (None, f"{REJECT} can't be null; set {REJECT}=… (exclude tokens", f"), or leave it out with ~{REJECT}"),
    ],
)
def test_a_value_of_several_types_is_one_problem_of_its_key(value: Any, start: str, end: str):
    (problem,) = problems_of({"algorithm": {"correction": {"reject": {"token_k1": value}}}})
    assert problem.startswith(start)
    assert problem.endswith(end)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trainer.steps": 3},
            "trainer.steps is one name with dots; in a YAML file, write steps on a line below trainer, without dots",
        ),
        (
            {"actor": {"optimizer.learning_rate": 1.0}},
            "actor.optimizer.learning_rate is one name with dots; in a YAML file, write learning_rate on a line below "
            "actor.optimizer, without dots",
        ),
        (
            {"reward": {"arguments": {1: "a"}}},
            "reward.arguments has the name 1, which isn't text; write it in quotes, as '1'",
        ),
        ({"reward": {"functions": {"a": None}}}, "leave it out with ~reward.functions.a"),
        ({"trainer.stepz": 3}, "did you mean trainer.steps?"),
    ],
)
def test_names_that_only_a_file_can_hold_are_explained(changes: dict[str, Any], message: str):
    (problem,) = problems_of(changes)
    assert message in problem


class Ranged(Section):
    bound: int = 1


class Named(Section):
    name: str = ""


class WithUnions(Section):
    rate: Ranged | Named = Ranged()
    note: str = "a"


def test_errors_within_a_union_of_sections_keep_their_keys():
    with pytest.raises(ValidationError) as caught:
        WithUnions.model_validate({"rate": {"bound": "x"}, "note": 3})
    found = {details["loc"] for details in _without_members(caught.value.errors(), root_key(WithUnions))}
    assert found == {("rate", "bound"), ("note",)}


def test_every_problem_of_a_config_is_said_at_once():
    assert len(problems_of({"seed": -1, "resume": "yes", "trainer": {"stepz": 1}})) == 3


def test_the_error_crosses_a_process_boundary():
    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert (error.problems, str(error)) == (["a", "b"], "a\nb")


def test_a_section_cannot_be_changed_after_validation():
    with pytest.raises(ValueError, match="frozen"):
        validate(VALID).trainer.steps = 3  # type: ignore[misc]

import json
from typing import Any

import pytest

from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("reward.arguments.cap=inf", "reward.arguments.cap is inf, .*set a finite number"),
        ("reward.arguments.limits={low: [0, -inf]}", r"reward.arguments.limits.low\[1\] is -inf"),
        ("algorithm.loss_arguments.clip=nan", "algorithm.loss_arguments.clip is nan"),
        ("roles.judge={target: x:Y, arguments: {cap: inf}}", "roles.judge.arguments.cap is inf"),
        ("evaluation.sets.s={source: s.jsonl, reward_arguments: {cap: inf}}", "sets.s.reward_arguments.cap is inf"),
        ("rollout.vllm.limit=inf", "rollout.vllm.limit is inf"),
        ("model.config.rope_theta=inf", "model.config.rope_theta is inf"),
        ("reward.arguments.weights={1: 0.5}", r"reward.arguments.weights has the name 1, .*arguments.weights.1=…"),
        (
            "reward.functions.f={function: x:y, arguments: {weights: {true: 1}}}",
            "functions.f.arguments.weights has the name True",
        ),
    ],
)
def test_an_argument_that_a_checkpoint_would_change_is_refused(override: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        compose([override])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("reward.arguments.a.1=2", {"a": {"1": 2}}),
        (
            "reward.arguments={a: [1, 2.5, null, true, text, {b: 1e300}]}",
            {"a": [1, 2.5, None, True, "text", {"b": 1e300}]},
        ),
    ],
)
def test_an_argument_that_is_accepted_survives_a_checkpoint(override: str, value: dict[str, Any]):
    stored = json.loads(json.dumps(compose([override]).model_dump(mode="json")))
    assert stored["reward"]["arguments"] == value

"""What engines on GPUs can't do."""

import pytest

from rlpack.config.compose import compose, compose_evaluation
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import EVALUATE_TARGET, config_class
from rlpack.config.roles import shares_gpus, sleep_level

ADAPTERS = ("placement=one_gpu", "rollout.engine=vllm", "actor.lora.rank=16", "rollout.lora=adapter")


def test_adapters_in_fp32_are_refused_on_gpus_and_nowhere_else():
    with pytest.raises(ConfigError, match=r"compute in fp32, but on GPUs vLLM applies adapters in bf16 only; set roll"):
        compose(ADAPTERS)
    compose([*ADAPTERS, "rollout.dtype=bf16"])
    compose([*ADAPTERS, "actor.precision=bf16"])
    compose(ADAPTERS[1:])


def test_temperatures_that_vllm_refuses_are_refused_at_once_and_with_vllm_only():
    with pytest.raises(ConfigError, match=r"rollout\.temperature is 2\.5, but vLLM samples at 2 or less; lower it, or"):
        compose(["rollout.engine=vllm", "rollout.temperature=2.5"])
    compose(["rollout.engine=vllm", "rollout.temperature=2.0"])
    compose(["rollout.temperature=2.5"])


def test_engines_of_an_evaluation_never_sleep_whatever_shares_their_gpus():
    defaults = config_class(EVALUATE_TARGET)().model_dump(mode="json")
    trained = compose().model_dump(mode="json")
    values = {name: trained[name] for name in ("data", "reward", "rollout")}
    config = compose_evaluation(
        ["placement=one_gpu", "rollout.engine=vllm", "+roles.scorer.target=rlpack.workers.reward:RewardWorker"],
        values | {"model": defaults["model"] | {"path": "somewhere"}},
    )
    assert (shares_gpus(config), sleep_level(config)) == (True, 0)

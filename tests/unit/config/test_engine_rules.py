"""What engines on GPUs can't do."""

import pytest

from rlpack.config.compose import compose, compose_evaluation
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import EVALUATE_TARGET, config_class
from rlpack.config.roles import shares_gpus, sleep_level
from rlpack.config.warnings import config_warnings

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


def test_long_responses_with_a_short_deadline_cause_a_warning_that_says_what_to_raise():
    def found(*overrides: str) -> list[str]:
        config = compose(["batching.overlong=truncate", *overrides])
        return [text for text in config_warnings(config) if "request_timeout_s" in text]

    (text,) = found("rollout.engine=vllm", "rollout.max_new_tokens=16384")
    assert "rollout.max_new_tokens is 16384 and rollout.request_timeout_s is 600: " in text
    assert "needs 27 tokens/s" in text
    assert "may reach only 10." in text
    assert text.endswith("raise rollout.request_timeout_s, such as to 1639")
    assert not found("rollout.engine=vllm", "rollout.max_new_tokens=16384", "rollout.request_timeout_s=1639")
    assert not found("rollout.engine=vllm", "rollout.max_new_tokens=6000")
    assert not found("rollout.engine=hf", "rollout.max_new_tokens=16384")
    (text,) = found(
        "rollout.engine=vllm", "rollout.max_new_tokens=1024", "rollout.max_num_seqs=4", "trainer.group_size=30"
    )
    assert (
        "needs 14 tokens/s, its time in the engine's queue included; trainer.group_size=30 responses take 8 turns"
        in text
    )
    assert text.endswith("raise rollout.request_timeout_s, such as to 820")

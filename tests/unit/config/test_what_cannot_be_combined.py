"""The guide's list of settings that can't be combined: each is refused with the keys to change.

Resuming 8-bit moments on other layouts depends on more than the configuration, and so do experts with `compile` in a
model of the hub (tests/unit/models/test_compiled_layers.py).
"""

import pytest

from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError

COMPILED, SHARED, REPLAYED = "actor.compile=true", "batching.share_prompts=true", "actor.moe.replay_routing=true"
BYPASS = "algorithm.correction.bypass=true"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        *(
            ((COMPILED, f"actor.parallel.{name}=2"), f"actor.parallel.{name}=2 divides")
            for name in ("cp", "tp", "ep", "pp")
        ),
        ((COMPILED, "batching.mode=dynamic"), "set batching.mode=packed or actor.compile=false"),
        ((COMPILED, "batching.mode=fixed"), "set batching.mode=packed or actor.compile=false"),
        ((COMPILED, "actor.gradient_checkpointing=selective"), "set actor.gradient_checkpointing to full or none"),
        ((COMPILED, "actor.offload=parameters"), "set actor.offload=optimizer or actor.compile=false"),
        (
            (COMPILED, "model.config={model_type: qwen3_moe, num_experts: 8}"),
            "the model has 8 experts, whose numbers of tokens change with every row",
        ),
        ((COMPILED, "actor.lora.rank=4"), "set actor.compile=false"),
        ((SHARED, "actor.parallel.cp=2", "actor.parallel.cp_method=all_gather"), "actor.parallel.cp_method=ulysses"),
        ((SHARED, "batching.mode=fixed"), "needs batching.mode=packed"),
        ((SHARED, "batching.mode=dynamic"), "needs batching.mode=packed"),
        ((SHARED, "batching.equal_rows=true"), "batching.share_prompts or batching.equal_rows to false"),
        ((SHARED, "batching.pad_to_multiple=2"), "needs batching.pad_to_multiple=1"),
        ((SHARED, REPLAYED), "set batching.share_prompts=false or actor.moe.replay_routing=false"),
        (
            (REPLAYED, BYPASS),
            "set actor.moe.replay_routing=false, algorithm.correction.bypass=false, or algorithm.correction.reject",
        ),
        (("actor.optimizer.name=adamw_8bit", "actor.offload=optimizer"), "set actor.offload=none or parameters"),
        (("actor.optimizer.name=adamw_8bit", "checkpoint.asynchronous=true"), "set checkpoint.asynchronous=false, or"),
    ],
)
def test_what_the_guide_lists_is_refused(words: tuple[str, ...], named: str):
    with pytest.raises(ConfigError) as refused:
        compose(list(words))
    assert named in str(refused.value)


def test_routing_can_be_replayed_with_bypass_if_rejection_needs_the_pass():
    config = compose([REPLAYED, BYPASS, "algorithm.correction.reject={token_k3: 0.5}"])
    assert not config.algorithm.correction.skips_old_logprobs

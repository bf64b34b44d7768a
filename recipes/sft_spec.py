"""The spec of supervised fine-tuning: one role, demonstrations, and no algorithm."""

from collections.abc import Iterator

from rlpack.config.recipes import RecipeSpec
from rlpack.config.schema import Config


def one_step_per_batch(config: Config) -> Iterator[str]:
    """Refuse mini-batches: a batch is one optimizer step."""
    trainer = config.trainer
    if trainer.mini_batch_size is not None or trainer.updates_per_batch != 1:
        yield (
            "recipe=sft makes one optimizer step of trainer.prompts_per_step sequences at a time; "
            "leave trainer.mini_batch_size=null and trainer.updates_per_batch=1"
        )


def no_warmup(config: Config) -> Iterator[str]:
    """Refuse a supervised warm-up before supervised fine-tuning."""
    if config.sft_warmup.steps > 0:
        yield (
            f"sft_warmup.steps is {config.sft_warmup.steps} (some presets set it, such as experiment=smoke), but "
            "recipe=sft has no warm-up; add sft_warmup.steps=0"
        )


_OF_ADVANTAGES = ("advantage", "advantage_arguments", "baseline", "scale")
_OF_POLICY_LOSSES = (
    *("loss", "loss_arguments", "clip_low", "clip_high", "dual_clip", "entropy_coef"),
    *("kl_coef", "kl_estimator", "k3_bound", "kl_straight_through", "kl_placement", "kl_target", "kl_horizon"),
)
SPEC = RecipeSpec(
    roles=("actor",),
    rules=(one_step_per_batch, no_warmup),
    ignores={
        **dict.fromkeys((f"algorithm.{name}" for name in _OF_ADVANTAGES), "there are no advantages"),
        **dict.fromkeys(
            (f"algorithm.{name}" for name in _OF_POLICY_LOSSES), "the loss is the cross-entropy of demonstrations"
        ),
        "trainer.group_size": "each demonstration is one sequence",
    },
    needs_demonstrations=True,
)

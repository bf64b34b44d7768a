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


SPEC = RecipeSpec(
    roles=("actor",),
    rules=(one_step_per_batch, no_warmup),
    ignores={
        **dict.fromkeys(("algorithm.advantage", "algorithm.baseline", "algorithm.scale"), "there are no advantages"),
        "algorithm.loss": "the loss is the cross-entropy of demonstrations",
    },
    needs_demonstrations=True,
)

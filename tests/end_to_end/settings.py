"""Overrides that several tests start from."""

# Nine prompts of two operands, which a tiny model learns in seconds.
EASY = (
    "data.generator.min_operands=2",
    "data.generator.max_operands=2",
    "data.generator.largest_operand=2",
    "data.generator.train_size=64",
    "data.generator.validation_size=2",
    "rollout.max_new_tokens=12",
)
# A reward that differs among the responses of a model that has hardly been trained.
FIRST_CHARACTER = ("reward.function=rlpack.rewards.functions:matches", "reward.arguments.pattern='^[0-9+]'")
# Responses of unlike lengths, two passes over each rollout batch with different mini-batches, and a short warm-up.
UNEVEN = (
    "data.generator.min_operands=1",
    "data.generator.max_operands=4",
    "data.generator.mean_operands=2",
    "data.generator.largest_operand=2",
    "data.generator.train_size=256",
    "data.generator.validation_size=8",
    "rollout.max_new_tokens=20",
    "sft_warmup.steps=20",
    "sft_warmup.batch_size=32",
    "sft_warmup.learning_rate=1e-3",
    # Small and constant: AdamW divides gradients by their size, so large steps would blow rounding up.
    "actor.optimizer.learning_rate=1e-4",
    "actor.optimizer.schedule=constant",
    "trainer.prompts_per_step=8",
    "trainer.group_size=4",
    "trainer.mini_batch_size=16",
    "trainer.updates_per_batch=2",
    "trainer.shuffle_mini_batches=true",
    "evaluation.every=2",
    "evaluation.samples=4",
    "checkpoint.every=3",
    "batching.max_tokens=96",
)
# A KL term against a reference with batching of its own.
REFERENCE = ("algorithm.kl_coef=0.05", "reference.batching.mode=dynamic", "reference.batching.max_tokens=84")

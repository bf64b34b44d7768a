"""The number of steps of a run, which may follow from the number of its training prompts."""

import math

from rlpack.config.errors import ConfigError
from rlpack.config.rules import broken_rules
from rlpack.config.schema import Config


def with_steps(config: Config, num_prompts: int) -> Config:
    """Return a configuration whose `trainer.steps` is the number of steps that `trainer.data_epochs` asks for.

    The last step ends the last pass or goes beyond it: ceil(data_epochs · num_prompts / prompts_per_step) steps. A
    recipe that discards prompts, such as DAPO, passes over the data more often. `trainer.data_epochs` is then null.

    Args:
        config: the whole configuration.
        num_prompts: the run's training prompts.

    Raises:
        ConfigError: a key doesn't go with the number of steps.
    """
    trainer = config.trainer
    if trainer.data_epochs is None:
        return config
    steps = math.ceil(round(trainer.data_epochs * num_prompts, 6) / trainer.prompts_per_step)
    resolved = config.model_copy(update={"trainer": trainer.model_copy(update={"steps": steps, "data_epochs": None})})
    if problems := broken_rules(resolved):
        passes = f"trainer.data_epochs={trainer.data_epochs:g} over {num_prompts} prompts"
        raise ConfigError([f"{passes} is trainer.steps={steps}: {problem}" for problem in problems])
    return resolved

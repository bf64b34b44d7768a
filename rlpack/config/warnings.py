"""What is allowed and can run, but will hardly do what was meant; `train` warns of it."""

from collections.abc import Iterator
from pathlib import Path

from rlpack.config.schema import Algorithm, Config


def odd_choices(config: Config) -> list[str]:
    """Return what is allowed and can run, but will hardly do what was meant.

    >>> from rlpack.config.schema import Trainer
    >>> odd_choices(Config(trainer=Trainer(group_size=1)))[0].partition(":")[0]
    'trainer.group_size is 1'
    """
    found = []
    if config.recipe == "grpo" and config.trainer.group_size == 1:
        found.append("trainer.group_size is 1: a group of one has no advantage, so nothing but the KL term trains")
    if config.recipe == "grpo" and config.trainer.group_size == 2 and config.algorithm.scale == "std":
        found.append("trainer.group_size is 2 and algorithm.scale is std: every advantage is -1, 0 or 1")
    if config.recipe != "sft" and config.actor.lora.dropout > 0:
        found.append(
            f"actor.lora.dropout is {config.actor.lora.dropout:g}: updates drop inputs and rollouts don't, so ratios "
            "are off 1 from the first on"
        )
    size, sequences = config.trainer.mini_batch_size, config.trainer.prompts_per_step * config.trainer.group_size
    if size is not None and size > sequences:
        found.append(f"trainer.mini_batch_size is {size}: the {sequences} sequences of a rollout batch are one step")
    if config.recipe == "ppo" and config.critic.warmup_steps >= config.trainer.steps > 0:
        found.append(f"critic.warmup_steps is {config.critic.warmup_steps}: the policy itself is never trained")
    if config.recipe == "remax" and config.algorithm.advantage != "remax":
        found.append(f"algorithm.advantage is {config.algorithm.advantage}: the greedy responses are used for nothing")
    return [*found, *_unread(config)]


def _unread(config: Config) -> Iterator[str]:
    """Yield what is set and changes nothing."""
    algorithm, default = config.algorithm, Algorithm()
    for name, section, is_read in (
        ("critic", config.critic, config.recipe == "ppo"),
        ("dapo", config.dapo, config.recipe == "dapo"),
        ("reward_model", config.reward_model, config.reward_model.path is not None),
    ):
        if not is_read and section != type(section)():
            way_out = f"recipe={name}" if name == "dapo" else "recipe=ppo" if name == "critic" else f"{name}.path"
            yield f"{name}.* is set and nothing reads it without {way_out}"
    yield from _unread_of_advantages(config)
    if not _holds_revisions(config):
        yield f"model.revision is {config.model.revision!r} and nothing reads it: model.path is a folder"
    folder = config.critic.path
    if config.critic.revision is not None and folder is not None and Path(folder).expanduser().is_dir():
        yield f"critic.revision is {config.critic.revision!r} and nothing reads it: critic.path is a folder"
    if algorithm.kl_target is None and algorithm.kl_horizon != default.kl_horizon:
        yield f"algorithm.kl_horizon is {algorithm.kl_horizon:g} and nothing reads it without algorithm.kl_target"


def _unread_of_advantages(config: Config) -> Iterator[str]:
    algorithm, default = config.algorithm, Algorithm()
    if config.recipe in ("sft", "ppo"):
        why = "there are no advantages" if config.recipe == "sft" else "advantages come from the critic"
        why = f"with recipe={config.recipe} {why}"
    elif algorithm.advantage != "group_relative" and ":" not in algorithm.advantage:  # a function may ask for them
        why = f"algorithm.advantage={algorithm.advantage} has no use for it"
    else:
        return
    for name in ("baseline", "scale"):
        if (value := dict(algorithm)[name]) != dict(default)[name]:
            yield f"algorithm.{name} is {value} and nothing reads it: {why}"


def _holds_revisions(config: Config) -> bool:
    """Whether a pinned revision is of something: a model or tokenizer of the hub, or code that has to be pinned."""
    model = config.model
    places = [place for place in (model.path, model.tokenizer) if place is not None]
    is_local = all(Path(place).expanduser().is_dir() for place in places)
    return model.revision is None or model.trust_remote_code or not is_local

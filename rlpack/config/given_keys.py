"""Rules about keys that a command sets, even to their defaults, which a composed config doesn't tell."""

from collections.abc import Collection, Iterator, Sequence

from rlpack.config.schema import Config


def given_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys and groups that overrides set.

    >>> sorted(given_keys(["seed=2", "+roles.judge.target=a:B", "~reward.functions"]))
    ['roles.judge.target', 'seed']
    """
    return frozenset(override.lstrip("+").partition("=")[0] for override in overrides if not override.startswith("~"))


def given_key_problems(config: Config, given: Collection[str]) -> Iterator[str]:
    """Yield keys that are set, but that another key rules out.

    Args:
        config: a valid configuration.
        given: keys that the command sets.
    """
    if config.trainer.data_epochs is not None and "trainer.steps" in given:
        yield (
            "trainer.steps and trainer.data_epochs both say how long to train; set one of them (or "
            "trainer.data_epochs=null, where a preset sets it)"
        )
    names = list(config.reward.functions)
    if names and "reward.function" in given:
        yield (
            f"reward.function is {config.reward.function}, but reward.functions has {', '.join(names)}, so it would "
            "have no effect; leave out one of them (~reward.functions leaves out those of an evaluated run)"
        )

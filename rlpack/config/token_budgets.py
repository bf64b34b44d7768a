"""Token budgets of a run's roles, and whether they hold a sequence."""

from collections.abc import Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import forward_batching, longest_rollout, role_batching, started_roles
from rlpack.config.schema import Config
from rlpack.packing.batching import Batching


def with_microbatches(config: Config) -> list[str]:
    """Return the started roles whose rows are planned within a token budget."""
    return [role for role in started_roles(config) if role not in {"rollout", "reward"}]


def batchings(config: Config, role: str) -> Iterator[tuple[Batching, bool]]:
    """Yield a role's batching, and that of its passes without gradients; each with whether it is of the latter.

    Raises:
        ConfigError: as `role_batching`.
    """
    yield role_batching(config, role), False
    if (forward := forward_batching(config, role)) is not None:
        yield forward, True


def slots_of(batching: Batching, tokens: int) -> int:
    """Return the slots that a sequence takes.

    >>> slots_of(Batching(pad_to_multiple=64), 65)
    128
    """
    return -(-tokens // batching.alignment) * batching.alignment


def holds(batching: Batching, tokens: int) -> bool:
    """Return whether a microbatch holds a sequence, or the batching allows for overlong ones."""
    return batching.overlong != "error" or slots_of(batching, tokens) <= batching.budget


def roles_over_budget(config: Config) -> Iterator[str]:
    """Yield the roles that would refuse the longest rollout, or any sequence at all.

    Raises:
        ConfigError: as `role_batching`.
    """
    longest = longest_rollout(config) if recipe_of(config).generates else 0
    for role in with_microbatches(config):
        if not all(holds(each, longest) and each.alignment <= each.budget for each, _ in batchings(config, role)):
            yield role

"""Which leads the recipe of a run accepts, for `rlpack simulate RUN --async`."""

from pathlib import Path
from typing import NamedTuple

from rlpack.cli.rates_of_run import config_of
from rlpack.cli.user_modules import import_from_working_directory
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import find_recipe
from rlpack.config.schema import Recipe


class LeadLimit(NamedTuple):
    """The longest lead, and why.

    Attributes:
        longest: the largest `trainer.lead`; None for any.
        reason: why it can't be larger, or why the limit is not known; empty if neither.
    """

    longest: int | None
    reason: str = ""


def lead_limit(run_dir: Path) -> LeadLimit:
    """Return the limit of a run's recipe (`rlpack.config.ahead_rules`); none for anything but a run's directory."""
    config = config_of(run_dir)
    section = config.get("recipe")
    target = section.get("target") if isinstance(section, dict) else None
    if not isinstance(target, str):
        return LeadLimit(None)
    name = Recipe(target=target).name
    try:
        import_from_working_directory()
        spec = find_recipe(target)
    except ConfigError as error:
        return LeadLimit(None, f"the recipe of the run may refuse some of the leads, but can't be read: {error}")
    if not spec.runs_ahead:
        return LeadLimit(0, f"recipe={name} draws its batches itself")
    if not spec.draws_once:
        reason = f"with recipe={name} the first prompt of a batch is known only once the previous batch is drawn"
        return LeadLimit(1, reason)
    return LeadLimit(None)

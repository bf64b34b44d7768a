"""The started roles of a run by name."""

from typing import Any, NoReturn

from rlpack.distributed.worker_group import WorkerGroup


class RoleGroups(dict[str, WorkerGroup[Any]]):
    """Worker groups by the name of their role; an unknown name raises an error that lists the run's roles."""

    def __missing__(self, role: str) -> NoReturn:
        """Raise.

        Raises:
            KeyError: always.
        """
        raise KeyError(
            f"this run has no role {role!r}; it has {', '.join(self)}; correct the name, or add the role to the "
            "recipe's RecipeSpec"
        )

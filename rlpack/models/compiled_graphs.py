"""`CompiledGraphs`: count the graphs that torch.compile makes of a model's layers, and detect endless recompilation."""

import logging

_log = logging.getLogger(__name__)


class CompiledGraphs:
    """Counts the graphs that the process compiles, and warns once if there are too many."""

    def __init__(self, role: str, most: int) -> None:
        """Start counting.

        Args:
            role: the model's role, for the warning.
            most: maximum number of graphs that its layers need.
        """
        self._role, self._most, self._before, self._has_warned = role, most, _graphs(), False

    @property
    def count(self) -> int:
        """Return the number of graphs that were compiled since the start."""
        return _graphs() - self._before

    def check(self) -> None:
        """Warn if more graphs were compiled than the layers need."""
        if self._has_warned or self.count <= self._most:
            return
        self._has_warned = True
        _log.warning(
            "%s.compile: %d graphs were compiled, but at most %d were expected, so layers may be compiled again for "
            "every new length; torch's limit ends this by running them uncompiled. Set %s.compile=false, or look for "
            "the reasons with TORCH_LOGS=recompiles",
            *(self._role, self.count, self._most, self._role),
        )


def _graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    from torch._dynamo.utils import counters  # an import of seconds

    return counters["stats"]["unique_graphs"]

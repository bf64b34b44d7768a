"""What tests of every kind can ask for."""

from importlib.machinery import PathFinder
from pathlib import Path

import pytest

EIGHT_BIT = Path(__file__).parents[1] / ".eight_bit"


@pytest.fixture
def eight_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torchao at hand, also in processes started from here; `make test` puts it apart from the rest."""
    if PathFinder.find_spec("torchao") is None:  # one that an earlier test imported is of no use to new processes
        if not EIGHT_BIT.is_dir():
            pytest.skip("there is no torchao; `make test` installs it into .eight_bit")
        monkeypatch.syspath_prepend(EIGHT_BIT)

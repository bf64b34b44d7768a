"""What tests of every kind can ask for."""

import logging
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from rlpack.distributed import ray_connection

EIGHT_BIT = Path(__file__).parents[1] / ".eight_bit"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that `make test-long` uses."""
    parser.addoption("--long", action="store_true", help="also run the tests that are marked as long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip long tests unless they are asked for."""
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="runs in `make test-long`"))


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Restore the root logger, which `rlpack train` sets up for its whole process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave starting Ray to the recipe; `rlpack train` would start it while the recipe is imported."""
    monkeypatch.setattr(ray_connection, "fits_this_machine", lambda placement: False)


@pytest.fixture
def eight_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torchao at hand, also in processes started from here; `make test` puts it apart from the rest."""
    if PathFinder.find_spec("torchao") is None:  # one that an earlier test imported is of no use to new processes
        if not EIGHT_BIT.is_dir():
            pytest.skip("there is no torchao; `make test` installs it into .eight_bit")
        monkeypatch.syspath_prepend(EIGHT_BIT)

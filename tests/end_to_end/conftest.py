"""Runs that several tests look at."""

import pytest

from tests.end_to_end.commands import Command, done
from tests.end_to_end.settings import REFERENCE, UNEVEN


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Return a run of nine steps on two ranks that nothing stopped."""
    return done(tmp_path_factory.mktemp("uninterrupted"), *UNEVEN, *REFERENCE, "trainer.steps=9")

"""What holds for every unit test: none starts Ray."""

import pytest

from rlpack.distributed import ray_connection


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    """Leave Ray to the recipe, which unit tests replace; `rlpack train` would start it while the recipe is imported."""
    monkeypatch.setattr(ray_connection, "fits_this_machine", lambda placement: False)

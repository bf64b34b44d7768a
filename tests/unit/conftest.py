"""What holds for every unit test: none starts Ray."""

import pytest


@pytest.fixture(autouse=True)
def _no_ray(no_ray: None) -> None:
    """Leave Ray to the recipe, which unit tests replace."""

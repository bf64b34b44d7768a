"""Tests of the engine with vLLM itself; without it they are skipped. `make test-vllm` runs them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpack.rollout.vllm.vllm_package import installation_problem

PROBLEM = installation_problem(on_gpu=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; vLLM and what it imports warn about themselves."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if PROBLEM:
                item.add_marker(pytest.mark.skip(reason=PROBLEM))


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[Any]:
    """Return an engine with a Qwen2 whose output layer is its own; tests leave it with whole weights, or new ones."""
    from tests.vllm.engines import start

    engine = start("qwen2", tied=False)
    yield engine
    engine.close()

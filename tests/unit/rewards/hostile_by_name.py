"""Hostile functions that attack the machine around them, by name.

A function raises `Breach` if it got what it must not, and returns 0 if it was refused. The driver
(tests/unit/rewards/pool/driver.py) has the secret in its environment, on its command line and in files.
"""

from tests.unit.rewards import (
    hostile_files,
    hostile_kernel,
    hostile_more,
    hostile_pool,
    hostile_processes,
    hostile_resources,
    hostile_results,
)

FUNCTIONS = {}
for module in (
    hostile_processes,
    hostile_files,
    hostile_kernel,
    hostile_resources,
    hostile_results,
    hostile_pool,
    hostile_more,
):
    FUNCTIONS |= vars(module)


def call(completion, files):
    """Run the function that the row names."""
    reward = FUNCTIONS[completion](files)
    return 0.0 if reward is None else reward

"""Contract checks for users' roles, to be called from their tests.

from rlpack.testing import check_role, check_role_on_ray

def test_my_judge_keeps_the_contracts():
    check_role(BrevityWorker)             # in this process, without Ray: under a second

def test_my_judge_runs_and_dies_on_ranks():
    check_role_on_ray(BrevityWorker)      # in separate processes, one of which is killed
"""

from typing import TYPE_CHECKING, Any

from rlpack.testing.contracts import check_role
from rlpack.testing.errors import ContractError
from rlpack.testing.samples import sample_batch, sample_tokenizer

if TYPE_CHECKING:
    from rlpack.testing.on_ray import check_role_on_ray

__all__ = ["ContractError", "check_role", "check_role_on_ray", "sample_batch", "sample_tokenizer"]


def __getattr__(name: str) -> Any:
    """Import `check_role_on_ray` when it is first used; nothing else here needs Ray."""
    if name != "check_role_on_ray":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlpack.testing.on_ray import check_role_on_ray

    return check_role_on_ray

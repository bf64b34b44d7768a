"""Contract checks for users' roles, to be called from their tests.

from rlpack.testing import check_role, check_role_on_ray

def test_my_judge_keeps_the_contracts():
    check_role(BrevityWorker)             # in this process, without Ray: under a second

def test_my_judge_runs_and_dies_on_ranks():
    check_role_on_ray(BrevityWorker)      # in separate processes, one of which is killed
"""

from rlpack.testing.contracts import check_role
from rlpack.testing.errors import ContractError
from rlpack.testing.on_ray import check_role_on_ray
from rlpack.testing.samples import sample_batch, sample_tokenizer

__all__ = ["ContractError", "check_role", "check_role_on_ray", "sample_batch", "sample_tokenizer"]

"""Plans of passes without gradients, which may have a larger token budget than updates."""

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.roles import forward_batching
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.session import Session


def forward_plan(session: Session, role: str, batch: BatchedDataDict) -> MicrobatchPlan | None:
    """Return the plan of a role's passes without gradients over a batch; None if they follow the update's plan.

    A plan is made if `<role>.forward_batching` sets a key. It keeps the same tokens as the update's plan, and has
    one step, since no optimizer step ends in between.

    Args:
        session: the run.
        role: `actor` or `critic`.
        batch: the rows.
    """
    batching = forward_batching(session.config, role)
    return None if batching is None else session.groups[role].plan(batch, batching=batching)

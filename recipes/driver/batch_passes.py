"""Passes over a rollout batch: in arrival order, or with rows reassigned to other mini-batches in each pass.

A permutation is a function of the run's seed, the step and the pass, so a resumed run repeats it.
"""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.data.sampler import row_order, step_seed
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext

# Returns the columns that depend on the optimizer step of a row.
Weigh = Callable[[BatchedDataDict, MicrobatchPlan], Mapping[str, Tensor]]


def passes(
    session: Session, step: StepContext, role: str, batch: BatchedDataDict, plan: MicrobatchPlan, weigh: Weigh
) -> Iterator[tuple[BatchedDataDict, MicrobatchPlan]]:
    """Yield the rows and the plan of each of `trainer.updates_per_batch` passes.

    The first pass has the batch and its plan. With `trainer.shuffle_mini_batches`, each later one has the rows in
    another order, with their own plan and loss weights.

    Args:
        session: the run.
        step: the step in progress.
        role: the role that is updated.
        batch: the rows, with their loss weights.
        plan: their plan in mini-batches.
        weigh: returns the loss weights of rows for a plan.
    """
    trainer = session.config.trainer
    yield batch, plan
    for number in range(1, trainer.updates_per_batch):
        if not trainer.shuffle_mini_batches:
            yield batch, plan
            continue
        order = row_order(step_seed(session.config.seed, "passes", step.number), number, batch.num_rows)
        rows = batch.select(order)
        own = session.groups[role].plan(rows, mini_batches=True)
        weights = weigh(rows, own)
        yield rows.drop(list(weights)).union(weights), own

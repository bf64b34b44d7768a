"""Buffer a step's samples and plan until its metrics are logged."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlpack.observe.console import Sample
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.run_dir import LENGTHS, SAMPLES
from rlpack.observe.sinks import LogPhase
from rlpack.packing.analysis.data_rank import SINGLE_RANK
from rlpack.packing.plan import MicrobatchPlan

logger = logging.getLogger(__name__)


class PendingRecords:
    """Rollouts and a plan that wait for the next `write`.

    Attributes:
        samples: the rollouts.
        plan: the plan, and the tokens generated in each of its rows, if there are any.
        shape: hidden size and number of layers of the policy, if known.
        data_rank: the ranks of each data rank of the plan.
        replaces_samples: whether the next `write` deletes the rollouts of an earlier attempt.
    """

    def __init__(self) -> None:
        """Start without records."""
        self.samples: list[Sample] = []
        self.plan: tuple[MicrobatchPlan, Sequence[int] | None] | None = None
        self.shape: tuple[int, int] | None = None
        self.data_rank = SINGLE_RANK
        self.replaces_samples = False

    def write(self, run_dir: Path, step: int, phase: LogPhase) -> None:
        """Write the records as those of a step; ones that can't be written only cause a warning."""
        plan, samples = self.plan, self.samples
        self.plan, self.samples = None, []
        try:
            if plan is not None:
                PlanRecord.of(plan[0], step, plan[1], self.shape, self.data_rank).write(run_dir / LENGTHS)
            if self.replaces_samples:
                (run_dir / SAMPLES).unlink(missing_ok=True)
                self.replaces_samples = False
            if samples:
                # ASCII, because lone surrogates in a model's text can't be encoded as UTF-8.
                position = {"step": step, "phase": phase}
                lines = [json.dumps(position | asdict(sample)) + "\n" for sample in samples]
                with (run_dir / SAMPLES).open("a", encoding="utf-8") as stream:
                    stream.writelines(lines)
        except OSError as error:
            logger.warning("step %d of %s will be missing from the report: %s", step, phase, error)

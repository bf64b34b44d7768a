"""One step's lengths and batching, kept so that its packing can be drawn later and compared with other modes."""

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from rlpack.packing.batching import Batching, Mode
from rlpack.packing.cost import Cost
from rlpack.packing.plan import MicrobatchPlan
from rlpack.packing.planning import make_plan

logger = logging.getLogger(__name__)

TITLES: dict[Mode, str] = {
    "fixed": "fixed (padded, in arrival order)",
    "dynamic": "dynamic (padded, by length)",
    "packed": "packed",
}


@dataclass(frozen=True)
class PlanRecord:
    """What a plan was made from.

    Attributes:
        step: the step of the run.
        lengths: tokens of each row, in arrival order.
        batching: how they were batched.
        num_ranks: data-parallel ranks.
        mini_batch_size: sequences of one optimizer step; None for all.
        cost: of a sequence, by which ranks were balanced; None for its slots.
    """

    step: int
    lengths: tuple[int, ...]
    batching: Batching
    num_ranks: int
    mini_batch_size: int | None = None
    cost: Cost | None = None

    @classmethod
    def of(cls, plan: MicrobatchPlan, step: int = 0) -> Self:
        """Return what a plan was made from."""
        asked = plan.request
        lengths = tuple(int(length) for length in asked.lengths)
        return cls(step, lengths, asked.batching, asked.dp_size, asked.mini_batch_size, asked.cost)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what `write` wrote.

        Raises:
            ValueError, KeyError, TypeError: the file isn't such a record.
        """
        kept = json.loads(path.read_text(encoding="utf-8"))
        lengths = tuple(int(length) for length in kept["lengths"])
        cost = Cost(**kept["cost"]) if kept.get("cost") else None
        batching = Batching(**kept["batching"])
        return cls(kept["step"], lengths, batching, kept["num_ranks"], kept["mini_batch_size"], cost)

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def plan(self, mode: Mode | None = None) -> MicrobatchPlan:
        """Return the plan of these lengths, in another mode if one is given.

        Over-long rows get a microbatch of their own, so that a comparison never fails on them.
        """
        batching = replace(self.batching, mode=mode or self.batching.mode, overlong="own_microbatch")
        lengths = np.asarray(self.lengths, dtype=np.int64)
        return make_plan(
            lengths, batching, dp_size=self.num_ranks, mini_batch_size=self.mini_batch_size, cost=self.cost
        )

    def comparison(self) -> dict[str, MicrobatchPlan]:
        """Return plans of the same lengths by title: padded in arrival order, the mode of the run, and packed."""
        modes: list[Mode] = ["fixed", "dynamic", "packed"] if self.batching.mode == "dynamic" else ["fixed", "packed"]
        if self.batching.mode == "fixed" and self.batching.max_tokens is None:
            modes = ["fixed"]
        return {TITLES[mode]: self.plan(mode) for mode in modes}


def read_plan(path: Path) -> PlanRecord | None:
    """Return the record in a file, or None where there is none; one that can't be read is left out with a warning."""
    if not path.exists():
        return None
    try:
        return PlanRecord.read(path)
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s can't be read and the packing picture is left out: %s", path, error)
        return None

"""One step's lengths and batching, kept so that its packing can be drawn later and compared with other modes."""

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.packing.analysis.cost import Cost
from rlpack.packing.batching import Batching, Mode
from rlpack.packing.lengths import check_count, check_lengths
from rlpack.packing.make_plan import make_plan
from rlpack.packing.plan import MicrobatchPlan

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
            DataError: the file can't be read or isn't such a record; names file and value.
        """
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}; a run writes it anew with its next step") from error
        try:
            return cls._of(kept)
        except KeyError as error:
            raise DataError(f"{path} has no {error}; a run writes it anew with its next step") from error
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is no record of a plan: {error}") from error

    @classmethod
    def _of(cls, kept: Any) -> Self:
        """Return the record that was read from a file.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        if not isinstance(kept, dict):
            raise ValueError(f"it holds a {type(kept).__name__}, and should an object")
        lengths = tuple(check_lengths(kept["lengths"]).tolist())
        size = kept["mini_batch_size"]
        return cls(
            step=check_count(kept["step"], "step") if kept["step"] else 0,
            lengths=lengths,
            batching=Batching(**kept["batching"]),
            num_ranks=check_count(kept["num_ranks"], "num_ranks"),
            mini_batch_size=None if size is None else check_count(size, "mini_batch_size"),
            cost=Cost(**kept["cost"]) if kept.get("cost") else None,
        )

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
    except DataError as error:
        logger.warning("the packing picture is left out: %s", error)
        return None

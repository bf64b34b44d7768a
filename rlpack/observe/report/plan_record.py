"""The inputs of one step's plan, stored so that its packing can be drawn and compared with other modes."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rlpack.batch.errors import DataError
from rlpack.packing.analysis.cost import Cost
from rlpack.packing.analysis.data_rank import SINGLE_RANK, DataRank
from rlpack.packing.batching import Batching, Mode
from rlpack.packing.lengths import check_count, check_integers, check_lengths, check_seed
from rlpack.packing.make_plan import make_plan
from rlpack.packing.plan import MicrobatchPlan
from rlpack.safe_files import read_json

logger = logging.getLogger(__name__)

TITLES: dict[Mode, str] = {
    "fixed": "fixed (padded, in arrival order)",
    "dynamic": "dynamic (padded, by length)",
    "packed": "packed",
}


@dataclass(frozen=True)
class PlanRecord:
    """The inputs of a plan.

    Attributes:
        step: the step of the run.
        lengths: tokens of each row, in arrival order.
        batching: the batching settings, with the token budget of all ranks of a data rank together.
        num_ranks: data-parallel ranks.
        mini_batch_size: sequences per optimizer step; None for all.
        cost: cost model by which ranks were balanced; None for token slots.
        seed: seed of the packer `first_fit_shuffle`.
        groups: group of each row, if rows of a group stay together or share their prompts.
        prefixes: tokens of these prompts, if rows share them.
        whole_groups: whether a group is never divided.
        responses: tokens that were generated in each row; None without generation, and in older records.
        shape: hidden size and number of layers of the policy; None in older records.
        data_rank: the ranks of each data rank; a single one in older records.
    """

    step: int
    lengths: tuple[int, ...]
    batching: Batching
    num_ranks: int
    mini_batch_size: int | None = None
    cost: Cost | None = None
    seed: int = 0
    groups: tuple[int, ...] | None = None
    prefixes: tuple[int, ...] | None = None
    whole_groups: bool = False
    responses: tuple[int, ...] | None = None
    shape: tuple[int, int] | None = None
    data_rank: DataRank = SINGLE_RANK

    @classmethod
    def of(
        cls,
        plan: MicrobatchPlan,
        step: int = 0,
        responses: Sequence[int] | None = None,
        shape: tuple[int, int] | None = None,
        data_rank: DataRank = SINGLE_RANK,
    ) -> Self:
        """Return the inputs of a plan.

        Args:
            plan: the plan.
            step: the step of the run.
            responses: tokens that were generated in each row, in arrival order; None without generation.
            shape: hidden size and number of layers of the policy, if known.
            data_rank: the ranks of each data rank.
        """
        asked = plan.request
        groups = asked.groups if asked.prompts is None else asked.prompts
        of_rows = [None if each is None else tuple(each.tolist()) for each in (groups, asked.prefixes)]
        return cls(
            step,
            tuple(asked.lengths.tolist()),
            asked.batching,
            asked.dp_size,
            asked.mini_batch_size,
            asked.cost,
            asked.seed,
            *of_rows,
            whole_groups=groups is not None and not asked.split_groups,
            responses=None if responses is None else tuple(responses),
            shape=shape,
            data_rank=data_rank,
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record written by `write`.

        Raises:
            DataError: the file can't be read or isn't a plan record; names the file and the value.
        """
        try:
            values = read_json(path)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror or error}") from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}; the run rewrites it with its next step") from error
        try:
            return cls._from_json(values)
        except KeyError as error:
            raise DataError(f"{path} has no {error}; the run rewrites it with its next step") from error
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is not a plan record: {error}") from error

    @classmethod
    def _from_json(cls, values: Any) -> Self:
        """Return the record in decoded JSON.

        Raises:
            ValueError, KeyError, TypeError: it is invalid.
        """
        if not isinstance(values, dict):
            raise ValueError(f"it contains a {type(values).__name__} instead of an object")
        lengths = tuple(check_lengths(values["lengths"]).tolist())
        size = values["mini_batch_size"]
        return cls(
            step=check_count(values["step"], "step") if values["step"] else 0,
            lengths=lengths,
            batching=Batching(**values["batching"]),
            num_ranks=check_count(values["num_ranks"], "num_ranks"),
            mini_batch_size=None if size is None else check_count(size, "mini_batch_size"),
            cost=Cost(**values["cost"]) if values.get("cost") else None,
            seed=check_seed(values.get("seed", 0)),
            groups=_optional(values, "groups", len(lengths)),
            prefixes=_optional(values, "prefixes", len(lengths)),
            whole_groups=bool(values.get("whole_groups", False)),
            responses=_responses(values, lengths),
            shape=_shape(values),
            data_rank=DataRank(**values.get("data_rank", {})),
        )

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def plan(self, mode: Mode | None = None) -> MicrobatchPlan:
        """Return the plan of these lengths, optionally in another mode, which plans row by row.

        Sequences over the token budget get separate microbatches, so that a comparison never fails on them.
        """
        mode = mode or self.batching.mode
        is_own = mode == self.batching.mode
        shares = is_own and self.prefixes is not None
        return make_plan(
            self.lengths,
            replace(self.batching, mode=mode, overlong="own_microbatch", share_prompts=shares),
            dp_size=self.num_ranks,
            mini_batch_size=self.mini_batch_size,
            groups=self.groups if is_own else None,
            split_groups=not self.whole_groups,
            prefixes=self.prefixes if shares else None,
            cost=self.cost,
            seed=self.seed,
        )

    def comparison(self) -> dict[str, MicrobatchPlan]:
        """Return plans of the same lengths by title: padded in arrival order, batched as in the run, and packed."""
        modes: list[Mode] = ["fixed", "dynamic", "packed"] if self.batching.mode == "dynamic" else ["fixed", "packed"]
        if self.batching.mode == "fixed" and self.batching.max_tokens is None:
            modes = ["fixed"]
        return {TITLES[mode]: self.plan(mode) for mode in modes}


def _optional(values: dict[str, Any], name: str, num_rows: int) -> tuple[int, ...] | None:
    """Return one whole number per row; None if there are none.

    Raises:
        ValueError: they are not whole numbers, or not one per row.
    """
    if values.get(name) is None:
        return None
    integers = tuple(check_integers(values[name], name).tolist())
    if len(integers) != num_rows:
        raise ValueError(f"{name} has {len(integers)} entries for {num_rows} lengths")
    return integers


def _responses(values: dict[str, Any], lengths: Sequence[int]) -> tuple[int, ...] | None:
    """Return the response length of each row; None if there are none.

    Raises:
        ValueError: they are not one per row, or longer than it.
    """
    responses = _optional(values, "responses", len(lengths))
    if responses is None:
        return None
    for row, (response, length) in enumerate(zip(responses, lengths, strict=True)):
        if not 0 <= response <= length:
            raise ValueError(f"the response of row {row} has {response} tokens, but the row {length}")
    return responses


def _shape(values: dict[str, Any]) -> tuple[int, int] | None:
    """Return hidden size and number of layers; None if there are none.

    Raises:
        ValueError: they are not two positive whole numbers.
    """
    if values.get("shape") is None:
        return None
    hidden_size, layers = check_integers(values["shape"], "shape").tolist()
    return check_count(hidden_size, "hidden size"), check_count(layers, "number of layers")


def read_plan(path: Path) -> PlanRecord | None:
    """Return the record in a file, or None.

    A file that can't be read causes a warning.
    """
    if not path.exists():
        return None
    try:
        return PlanRecord.read(path)
    except DataError as error:
        logger.warning("the packing picture is skipped: %s", error)
        return None

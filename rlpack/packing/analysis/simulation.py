"""Forecast step time, idle share and memory of a plan on devices of a given speed.

A microbatch takes three times the FLOPs of its sequences' forward pass, plus a fixed time. An index takes as long as
its costliest rank, since sharded ranks wait for each other there: a step takes Σ_i max_rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

import numpy as np

from rlpack.packing.analysis.cost import Cost
from rlpack.packing.analysis.metrics import microbatch_costs, microbatch_slots
from rlpack.packing.analysis.shared_prompts import SharedPrompts, plan_rows
from rlpack.packing.batching import Algorithm, Batching, Mode
from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import MAX_LENGTH
from rlpack.packing.plan import MicrobatchPlan

FORWARD_AND_BACKWARD = 3.0
# Budgets are tried in steps of this factor below the memory limit.
_BUDGET_STEP = 2**0.5
_ALIGNMENTS = (1, 8, 64)
# Share of the activation memory that a suggestion leaves free; share of the step time that it has to save.
MEMORY_MARGIN, LEAST_GAIN = 0.1, 0.01


@dataclass(frozen=True)
class Device:
    """Speed and memory of one rank's device.

    If several devices work on the rows of a data-parallel rank, the speed is that of all of them together.

    Attributes:
        flops_per_s: sustained floating-point operations per second, not the peak.
        overhead_s: fixed time of every microbatch: kernel launches, gathering of sharded weights.
        bytes_per_slot: activation memory of the device that a token slot holds until its backward pass.
        fixed_bytes: weights, gradients and optimizer state of the rank.
        memory_bytes: memory of the device.
        cp: ranks that share the tokens of a microbatch; suggested budgets are multiples of it.

    Raises:
        PackingError: a value is negative or not finite, or the speed, a slot's bytes or cp are 0.
    """

    flops_per_s: float = 4e14
    overhead_s: float = 0.01
    bytes_per_slot: float = 1e6
    fixed_bytes: float = 0.0
    memory_bytes: float = 80e9
    cp: int = 1

    def __post_init__(self) -> None:
        """Check every value."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("overhead_s", "fixed_bytes") else np.finfo(float).tiny
            if not np.isfinite(value) or value < least:
                raise PackingError(
                    f"{field.name} is {value}; it has to be finite and {'at least' if not least else 'above'} 0"
                )

    @property
    def max_slots(self) -> int:
        """The largest number of slots for which one microbatch fits into memory."""
        return min(MAX_LENGTH, int((self.memory_bytes - self.fixed_bytes) / self.bytes_per_slot))


@dataclass(frozen=True)
class Forecast:
    """The expected time and memory of a plan.

    Attributes:
        step_s: seconds of all its optimizer steps.
        idle_share: share of the ranks' time spent waiting for other ranks.
        padding_share: share of the slots that hold no token.
        memory_bytes: memory of the rank that needs the most.
        microbatches: microbatches per rank, over all optimizer steps.
        tokens_per_s: real tokens per second and rank.
    """

    step_s: float
    idle_share: float
    padding_share: float
    memory_bytes: float
    microbatches: int
    tokens_per_s: float


def forecast(plan: MicrobatchPlan, cost: Cost, device: Device) -> Forecast:
    """Return the expected time and memory of a plan.

    `cost` is in FLOPs of a forward pass (`rlpack.models.flops`).

    >>> from rlpack.packing.make_plan import make_plan
    >>> plan = make_plan([100, 50], Batching(max_tokens=100), dp_size=2)
    >>> expected = forecast(plan, Cost(1e9), Device(flops_per_s=1e12, overhead_s=0.0))
    >>> round(expected.step_s, 3), round(expected.idle_share, 3)
    (0.3, 0.25)
    """
    lengths, shared = plan.lengths[plan.order], plan.shared[plan.order]
    costs = microbatch_costs(plan.batching, lengths, plan.counts, plan.padded_lengths, cost, shared)
    seconds = FORWARD_AND_BACKWARD / device.flops_per_s * costs + device.overhead_s
    step_s = float(seconds.max(axis=0, initial=0.0).sum())
    busy = float(seconds.sum()) / plan.num_ranks
    slots = microbatch_slots(plan.batching, plan.counts, plan.padded_lengths)
    tokens = plan.metrics.real_tokens / plan.num_ranks
    return Forecast(
        step_s=step_s,
        idle_share=1.0 - busy / step_s if step_s else 0.0,
        padding_share=plan.metrics.waste_ratio,
        memory_bytes=device.fixed_bytes + device.bytes_per_slot * int(slots.max(initial=0)),
        microbatches=plan.counts.shape[1],
        tokens_per_s=tokens / step_s if step_s else 0.0,
    )


@dataclass(frozen=True)
class Suggestion:
    """The batching with the least expected time.

    Attributes:
        batching: the batching.
        forecast: its expected time and memory.
        gain: share of the current batching's time that it saves; None if the current batching doesn't fit into memory.
    """

    batching: Batching
    forecast: Forecast
    gain: float | None = None

    @property
    def is_worth_it(self) -> bool:
        """Whether it saves more than the error of such a model."""
        return self.gain is None or self.gain >= LEAST_GAIN


def suggest(
    lengths: np.ndarray,
    batching: Batching,
    *,
    dp_size: int,
    cost: Cost,
    device: Device,
    mini_batch_size: int | None = None,
    modes: Sequence[Mode] = ("packed", "dynamic"),
    prompts: SharedPrompts | None = None,
) -> Suggestion:
    """Return the fastest batching, over modes, token budgets, alignments and packers, that fits into memory.

    A tenth of the memory beyond the fixed bytes stays free, as the memory model is incomplete.

    Args:
        lengths: lengths of the sequences, int64 [B].
        batching: the current batching, and the source of all other options; its alignment is the smallest one tried.
            Prompts are shared wherever they are given and the batching allows it.
        dp_size: number of data-parallel ranks.
        cost: FLOPs of a sequence's forward pass.
        device: device of each rank.
        mini_batch_size: rows of an optimizer step; None for all.
        modes: the modes to search.
        prompts: the prompts of the sequences, if packed ones share them.

    Raises:
        PackingError: the longest sequence doesn't fit into memory.
    """
    batching = batching.override(share_prompts=False)

    def suggestion(candidate: Batching) -> Suggestion:
        candidate = candidate if prompts is None else prompts.shared_in(candidate)
        plan = plan_rows(lengths, candidate, prompts, dp_size=dp_size, mini_batch_size=mini_batch_size, cost=cost)
        return Suggestion(candidate, forecast(plan, cost, device))

    room = int(device.max_slots * (1 - MEMORY_MARGIN))
    longest = int(lengths.max(initial=1))
    tried = (candidate for mode in modes for candidate in _candidates(mode, longest, batching, room, device.cp))
    suggestions = [suggestion(candidate) for candidate in tried]
    if not suggestions:
        raise PackingError(
            f"the longest sequence has {longest} tokens, and {room} slots fit into {1 - MEMORY_MARGIN:.0%} of memory "
            f"({device.memory_bytes / 1e9:g} GB less {device.fixed_bytes / 1e9:g}, "
            f"{device.bytes_per_slot / 1e3:,.0f} kB per slot); give more memory, keep fewer activations "
            "(--kb-per-slot: with checkpointing a tenth of that and less), or drop the sequence"
        )
    best = _fastest(suggestions)
    if best.batching.mode == "packed":
        best = _fastest([best, *(suggestion(replace(best.batching, algorithm=name)) for name in get_args(Algorithm))])
    current = suggestion(replace(batching, overlong="own_microbatch"))
    if current.forecast.memory_bytes > device.memory_bytes:
        return best
    return replace(best, gain=1 - best.forecast.step_s / current.forecast.step_s if current.forecast.step_s else 0.0)


def _fastest(suggestions: Sequence[Suggestion]) -> Suggestion:
    """Return the first suggestion with the least time, up to rounding."""
    least = min(each.forecast.step_s for each in suggestions)
    return next(each for each in suggestions if each.forecast.step_s <= least * (1 + 1e-6))


def _candidates(mode: Mode, longest: int, batching: Batching, room: int, cp: int) -> Iterator[Batching]:
    """Yield batchings of a mode whose microbatches hold the longest sequence, largest token budget first.

    No token budget exceeds `room` slots, and each is a multiple of `cp`.
    """
    for alignment in _ALIGNMENTS:
        multiple = alignment * (batching.pad_to_multiple if mode == "packed" else batching.length_multiple)
        least = -(-longest // multiple) * multiple
        aligned = {"pad_to_multiple" if mode == "packed" else "length_multiple": multiple}
        room_left = room
        while (budget := room_left - room_left % cp) >= least:
            if mode == "fixed":
                yield replace(batching, mode=mode, max_tokens=None, micro_batch_size=budget // least, **aligned)
            else:
                yield replace(batching, mode=mode, max_tokens=budget, **aligned)
            room_left = int(room_left / _BUDGET_STEP)

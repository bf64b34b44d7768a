import numpy as np
import pytest

from rlpack.packing import Batching, Cost, PackingError, make_plan
from rlpack.packing.analysis.simulation import Device, forecast, suggest
from rlpack.packing.analysis.traces import TRACES, trace

COST = Cost(1e9, 1e6)
DEVICE = Device(flops_per_s=3e12, overhead_s=0.5, bytes_per_slot=10.0, fixed_bytes=100.0, memory_bytes=1300.0)


def seconds(slots: list[int]) -> float:
    """Return the step time by definition: three forward passes of each sequence, and the overhead."""
    return 3 * sum(1e9 * slot + 1e6 * slot**2 for slot in slots) / 3e12 + 0.5


def test_a_packed_step_takes_the_costliest_rank_of_each_index() -> None:
    plan = make_plan([100, 60, 40, 30, 10], Batching(max_tokens=104, pad_to_multiple=8), dp_size=2, cost=COST)
    expected = forecast(plan, COST, DEVICE)
    aligned = -(-plan.lengths // 8) * 8
    grid = np.array(
        [[seconds(aligned[each.rows].tolist()) for each in plan.microbatches(rank, 0)] for rank in range(2)]
    )
    assert expected.step_s == pytest.approx(grid.max(axis=0).sum())
    assert expected.idle_share == pytest.approx(1 - grid.mean(axis=0).sum() / grid.max(axis=0).sum())
    assert expected.memory_bytes == 100 + 10 * plan.padded_lengths.max()
    assert expected.tokens_per_s == pytest.approx(240 / 2 / expected.step_s)


def test_a_padded_step_pays_for_its_padding() -> None:
    plan = make_plan([100, 60], Batching(mode="fixed", micro_batch_size=2), dp_size=1)
    expected = forecast(plan, COST, DEVICE)
    assert expected.step_s == pytest.approx(seconds([100, 100]))
    assert expected.padding_share == pytest.approx(0.2)
    assert (expected.memory_bytes, expected.idle_share) == (100 + 10 * 200, 0.0)


def test_the_suggestion_is_the_fastest_that_fits_into_memory() -> None:
    lengths = trace("lognormal", 200, longest=60, seed=4)
    best = suggest(lengths, Batching(max_tokens=1), dp_size=2, cost=COST, device=DEVICE)
    assert best.forecast.memory_bytes <= 100 + 0.9 * (DEVICE.memory_bytes - 100)
    assert best.batching.mode == "packed"
    for budget in (60, 80, 108):
        for mode in ("packed", "dynamic"):
            plan = make_plan(lengths, Batching(mode=mode, max_tokens=budget), dp_size=2, cost=COST)
            assert best.forecast.step_s <= forecast(plan, COST, DEVICE).step_s
    with pytest.raises(PackingError, match="the longest sequence has 200 tokens, and 108 slots fit into 90% of memory"):
        suggest(np.array([200]), Batching(), dp_size=2, cost=COST, device=DEVICE)


def test_a_gain_below_the_model_error_is_not_worth_it() -> None:
    lengths = trace("lognormal", 200, longest=60, seed=4)
    arguments = {"dp_size": 2, "cost": COST, "device": DEVICE}
    best = suggest(lengths, Batching(max_tokens=60), **arguments)
    assert best.is_worth_it
    current = forecast(make_plan(lengths, Batching(max_tokens=60), dp_size=2, cost=COST), COST, DEVICE)
    assert best.gain == pytest.approx(1 - best.forecast.step_s / current.step_s)
    assert not suggest(lengths, best.batching, **arguments).is_worth_it
    # A batching that doesn't fit into memory gives no baseline.
    assert suggest(lengths, Batching(max_tokens=10_000), **arguments).gain is None


def test_the_suggestion_searches_packers() -> None:
    lengths = trace("johnson", 600, longest=501, seed=1)
    device = Device(flops_per_s=1e20, overhead_s=1.0, bytes_per_slot=1.0, memory_bytes=1000 / 0.9 + 1)
    best = suggest(lengths, Batching(max_tokens=1000), dp_size=1, cost=COST, device=device, modes=("packed",))
    plan = make_plan(lengths, Batching(max_tokens=best.batching.max_tokens), dp_size=1, cost=COST)
    assert best.forecast.microbatches < plan.counts.shape[1]


def test_an_impossible_device_is_rejected() -> None:
    with pytest.raises(PackingError, match="flops_per_s is 0; it has to be finite and above 0"):
        Device(flops_per_s=0)
    with pytest.raises(PackingError, match="overhead_s is nan"):
        Device(overhead_s=float("nan"))


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_a_function_of_its_arguments(name: str) -> None:
    lengths = trace(name, 300, longest=512, seed=1)
    assert lengths.tolist() == trace(name, 300, longest=512, seed=1).tolist()
    assert lengths.tolist() != trace(name, 300, longest=512, seed=2).tolist()
    assert (lengths.size, lengths.dtype, lengths.min() >= 1, lengths.max() <= 512) == (300, np.int64, True, True)


def test_an_unknown_trace_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(PackingError, match="trace is 'zip'; choose one of zipf"):
        trace("zip", 3, longest=4)

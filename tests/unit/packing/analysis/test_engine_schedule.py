"""When responses end, against schedules computed by hand."""

import numpy as np
import pytest

from rlpack.packing.analysis.engine_schedule import Engines


def test_a_response_gets_faster_when_another_ends():
    engines = Engines(1, 8, token_s=1.0, token_s_per_response=0.5)
    batch = engines.add(0.0, np.array([2, 6, 4]))
    # 2 tokens of 2 s for three, 2 of 1.5 s for two, 2 of 1 s for one.
    assert engines.finish(batch) == pytest.approx(4 + 3 + 2)
    assert engines.busy_until(20.0) == pytest.approx(3 * 4 + 2 * 3 + 2)


def test_later_responses_slow_down_those_that_are_generated():
    engines = Engines(1, 8, token_s=1.0, token_s_per_response=1.0)
    first = engines.add(0.0, np.array([10]))
    second = engines.add(4.0, np.array([2]))
    assert engines.finish(second) == pytest.approx(4 + 2 * 2)
    assert engines.finish(first) == pytest.approx(8 + 4)
    assert second.starts.tolist() == [4.0]


def test_responses_wait_in_their_order_for_the_engine_with_the_fewest():
    engines = Engines(2, 2, token_s=1.0)
    batch = engines.add(0.0, np.array([9, 3, 5, 7, 4, 1]))
    assert engines.finish(batch) == pytest.approx(9)
    assert batch.starts.tolist() == [0, 0, 0, 0, 3, 5]


def test_a_pause_delays_what_is_generated_and_what_waits():
    engines = Engines(1, 1, token_s=1.0)
    batch = engines.add(0.0, np.array([4, 2]))
    engines.pause(1.0, 10.0)
    assert engines.finish(batch) == pytest.approx(4 + 10 + 2)
    assert batch.starts.tolist() == [0, 14]
    later = engines.add(30.0, np.array([1]))
    assert engines.finish(later) == 31
    assert engines.busy_until(40.0) == pytest.approx(7)


def test_a_batch_of_a_pause_starts_after_it():
    engines = Engines(1, 1, token_s=2.0)
    engines.pause(0.0, 5.0)
    batch = engines.add(1.0, np.array([3]))
    assert engines.finish(batch) == 11
    assert batch.starts.tolist() == [5]
    assert engines.busy_until(11.0) == pytest.approx(6)


def test_the_schedule_is_that_of_small_steps_of_time():
    """Random lengths and times against a simulation in steps of a hundredth of a second."""
    draws = np.random.default_rng(3)
    lengths, begins = [draws.integers(1, 30, 12) for _ in range(3)], [0.0, 7.5, 21.0]
    engines = Engines(2, 4, token_s=0.5, token_s_per_response=0.125)
    found = [engines.add(begin, batch) for begin, batch in zip(begins, lengths, strict=True)]
    ends = [engines.finish(batch) for batch in found]

    step_s, now = 0.01, 0.0
    queue, running, last = [], [[], []], [0.0] * 3
    pending = list(zip(begins, range(3), strict=True))
    while pending or queue or any(running):
        while pending and pending[0][0] <= now + 1e-9:
            number = pending.pop(0)[1]
            queue += [[number, float(length)] for length in lengths[number]]
        while queue and min(map(len, running)) < 4:
            min(running, key=len).append(queue.pop(0))
        now += step_s
        for rows in running:
            for row in rows:
                row[1] -= step_s / (0.5 + 0.125 * (len(rows) - 1))
            for row in [row for row in rows if row[1] <= 0]:
                rows.remove(row)
                last[row[0]] = now
    assert ends == pytest.approx(last, abs=1.0)  # each end is seen up to a step too late

"""Windows of an engine's statistics: what they hold, where they end, and that no token is lost between them."""

import itertools
import random

from rlpack.rollout.engine_meter import EngineMeter

Window = tuple[str, int, int, dict[str, float]]


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def meter_of() -> tuple[EngineMeter, Clock, list[Window]]:
    clock, windows = Clock(), list[Window]()
    return EngineMeter(lambda *window: windows.append(window), clock, 0.2), clock, windows


def test_windows_follow_each_other_until_nothing_is_left_to_do():
    meter, clock, windows = meter_of()
    meter.begin()
    for now, running in ((10.1, 4), (10.25, 2), (10.3, 2), (10.35, 0)):
        clock.now = now
        meter.add(running, 1 if running else 0, running / 10, 3)
    assert [(begin, end) for _, begin, end, _ in windows] == [(10_000_000, 10_250_000), (10_250_000, 10_350_000)]
    assert windows[0][3] == {"running": 3.0, "waiting": 1.0, "cache": 0.4, "tokens": 6}
    assert windows[1][3] == {"running": 1.0, "waiting": 0.5, "cache": 0.2, "tokens": 6}


def test_the_next_request_starts_a_window_and_idle_time_is_in_none():
    meter, clock, windows = meter_of()
    meter.begin()
    meter.add(0, 0, 0.0, 1)
    clock.now = 500.0
    meter.add(0, 0, 0.0, 0)  # vLLM reports a call that isn't a request
    meter.begin()
    meter.begin()
    clock.now = 500.5
    meter.add(1, 0, 0.1, 7)
    assert [(begin, end) for _, begin, end, _ in windows] == [(10_000_000, 10_000_000), (500_000_000, 500_500_000)]
    assert windows[1][3]["tokens"] == 7


def test_an_interruption_ends_the_window_at_the_last_iteration():
    meter, clock, windows = meter_of()
    meter.begin()
    clock.now = 10.1
    meter.add(3, 0, 0.1, 3)
    clock.now = 90.0
    meter.end()
    meter.end()
    assert windows == [("engine", 10_000_000, 10_100_000, {"running": 3.0, "waiting": 0.0, "cache": 0.1, "tokens": 3})]


def test_no_token_is_lost_and_no_two_windows_overlap():
    draw, (meter, clock, windows), tokens = random.Random(0), meter_of(), 0
    for _ in range(2000):
        clock.now += draw.expovariate(20.0)
        match draw.choice(("begin", "add", "add", "add", "idle", "end")):
            case "begin":
                meter.begin()
            case "add":
                tokens += (sampled := draw.randrange(5))
                meter.add(draw.randrange(1, 5), draw.randrange(3), draw.random(), sampled)
            case "idle":
                meter.add(0, 0, 0.0, 0)
            case "end":
                meter.end()
    meter.end()
    assert sum(values["tokens"] for _, _, _, values in windows) == tokens
    assert all(one[2] <= other[1] for one, other in itertools.pairwise(windows))
    assert len(windows) > 100

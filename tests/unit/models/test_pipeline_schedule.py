"""Schedules of pipeline ranks: order, deadlocks, and the time in which ranks wait."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import pytest

from rlpack.models.pipeline_schedule import Turn, forward_turns, pipeline_turns
from rlpack.models.stage_link import groups_of_links


@dataclass
class Place:
    rank: int
    num_stages: int
    num_virtual: int = 1


def turns(microbatches: int, rank: int, num_stages: int, num_virtual: int = 1) -> list[Turn]:
    return list(pipeline_turns(microbatches, Place(rank, num_stages, num_virtual)))


def all_turns(microbatches: int, num_stages: int, num_virtual: int) -> list[list[Turn]]:
    return [turns(microbatches, rank, num_stages, num_virtual) for rank in range(num_stages)]


def most_in_flight(schedule: list[Turn]) -> int:
    """Return the largest number of forward passes without their backward pass."""
    open_passes, most = 0, 0
    for turn in schedule:
        open_passes += 1 if turn.direction == "forward" else -1
        most = max(most, open_passes)
    return most


@dataclass
class Simulation:
    """Ranks that run schedules: each receives, computes and sends, and waits while too many messages are on the way.

    A message is (microbatch, stage of the sender). A channel is one direction between two ranks; messages arrive in the
    order in which they were sent, and a rank that gets another one than it expects is an error.

    Attributes:
        schedules: of each rank.
        num_virtual: virtual stages of each rank.
        limit: messages of a channel that may be on the way before their sender waits.
        first_waits: whether a sender waits for the receiver of a channel's first message, as when it connects.
        cost: of a forward pass of a virtual stage; a backward pass costs twice that.
    """

    schedules: list[list[Turn]]
    num_virtual: int
    limit: int
    first_waits: bool = False
    cost: float = 1.0
    sent: dict[tuple[int, str], list[tuple[tuple[int, int], float]]] = field(default_factory=lambda: defaultdict(list))
    received: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.num_ranks = len(self.schedules)
        self.num_stages = self.num_ranks * self.num_virtual
        self.clocks = [0.0] * self.num_ranks

    def run(self) -> float | None:
        """Return when the last rank ends; None if ranks wait for each other."""
        running = [self._rank(rank) for rank in range(self.num_ranks)]
        left, moved = set(range(self.num_ranks)), True
        while left and moved:
            moved = False
            for rank in sorted(left):
                step = next(running[rank], None)
                moved = moved or step is not False
                if step is None:
                    left.remove(rank)
        return None if left else max(self.clocks)

    def _rank(self, rank: int) -> Iterator[bool]:
        """Yield after each action whether it was one; False while the rank waits."""
        for direction, microbatch, virtual in self.schedules[rank]:
            stage = rank + virtual * self.num_ranks
            step = 1 if direction == "forward" else -1
            if 0 <= stage - step < self.num_stages:
                channel = (stage - step) % self.num_ranks, direction
                while len(self.received[channel]) == len(self.sent[channel]):
                    yield False
                message, time = self.sent[channel][len(self.received[channel])]
                assert message == (microbatch, stage - step)
                self.clocks[rank] = max(self.clocks[rank], time)
                self.received[channel].append(self.clocks[rank])
            self.clocks[rank] += self.cost * (1 if direction == "forward" else 2)
            if 0 <= stage + step < self.num_stages:
                channel = rank, direction
                self.sent[channel].append(((microbatch, stage), self.clocks[rank]))
                yield True
                expected = max(len(self.sent[channel]) - self.limit, int(self.first_waits))
                while len(self.received[channel]) < expected:
                    yield False
                if expected > 0:
                    self.clocks[rank] = max(self.clocks[rank], self.received[channel][expected - 1])
            yield True


PIPELINES = [
    (num_stages, num_virtual, num_stages * multiple)
    for num_stages, num_virtual, multiple in product((2, 3, 4, 5, 8), (1, 2, 3, 4), (1, 2, 3, 5))
]


def test_each_microbatch_passes_each_virtual_stage_forward_then_backward():
    for num_stages, num_virtual, microbatches in PIPELINES:
        for schedule in all_turns(microbatches, num_stages, num_virtual):
            places = {turn: place for place, turn in enumerate(schedule)}
            assert len(places) == len(schedule) == 2 * microbatches * num_virtual
            for microbatch, virtual in product(range(microbatches), range(num_virtual)):
                forward, backward = (places[Turn(way, microbatch, virtual)] for way in ("forward", "backward"))
                assert forward < backward
                if virtual > 0:
                    assert places[Turn("forward", microbatch, virtual - 1)] < forward
                    assert backward < places[Turn("backward", microbatch, virtual - 1)]


def test_stages_keep_the_activations_of_as_many_passes_as_they_have_to():
    for num_stages, num_virtual, microbatches in PIPELINES:
        for rank, schedule in enumerate(all_turns(microbatches, num_stages, num_virtual)):
            behind = num_stages - rank - 1
            most = behind + 1 if num_virtual == 1 else 2 * behind + (num_virtual - 1) * num_stages + 1
            assert most_in_flight(schedule) == min(most, microbatches * num_virtual)


@pytest.mark.parametrize("first_waits", [False, True])
def test_no_rank_waits_forever(first_waits: bool):
    for num_stages, num_virtual, microbatches in PIPELINES:
        for limit in range(1 + first_waits, num_stages + 1):
            schedules = all_turns(microbatches, num_stages, num_virtual)
            assert Simulation(schedules, num_virtual, limit, first_waits).run() is not None
            passes = forward_turns(range(microbatches), Place(0, num_stages, num_virtual))
            forwards = [Turn("forward", *each) for each in passes]
            assert Simulation([forwards] * num_stages, num_virtual, limit, first_waits).run() is not None


def test_passes_alone_end_with_any_number_of_microbatches():
    for num_stages, num_virtual, microbatches in product((2, 3, 4), (1, 2, 3), range(12)):
        passes = list(forward_turns(range(microbatches), Place(0, num_stages, num_virtual)))
        forwards = [Turn("forward", *each) for each in passes]
        assert Simulation([forwards] * num_stages, num_virtual, num_stages).run() is not None
        assert [each for each, virtual in passes if virtual == num_virtual - 1] == list(range(microbatches))
        assert Counter(virtual for _, virtual in passes) == Counter(list(range(num_virtual)) * microbatches)


def test_ranks_that_would_wait_for_each_other_are_found():
    schedules = all_turns(4, 2, 1)
    assert Simulation(schedules, 1, limit=0).run() is None  # both send, and neither receives
    schedules = all_turns(4, 2, 2)
    schedules[0] = sorted(schedules[0], key=lambda turn: turn.direction == "backward")
    assert Simulation(schedules, 2, limit=8).run() is None  # a gradient comes before the last forward pass


def test_every_pass_has_a_larger_number_than_what_it_waits_for():
    # The numbers of the module's docstring.
    for num_stages, num_virtual, microbatches in PIPELINES:
        wide = 1 if num_virtual == 1 else 2
        gap = 2 * num_stages - 1 if wide == 1 else 4 * (num_stages - 1) + 2 * (num_virtual - 1) * num_stages + 1
        numbers: dict[tuple[str, int, int], int] = {}
        for rank, schedule in enumerate(all_turns(microbatches, num_stages, num_virtual)):
            counts, before = Counter[str](), -1
            for direction, microbatch, virtual in schedule:
                k = counts[direction]
                counts[direction] += 1
                number = 2 * k + wide * rank if direction == "forward" else 2 * k - wide * rank + gap
                assert before < number
                before = numbers[direction, microbatch, rank + virtual * num_stages] = number
        for (direction, microbatch, stage), number in numbers.items():
            source = stage - 1 if direction == "forward" else stage + 1
            assert numbers.get((direction, microbatch, source), -1) < number


def test_virtual_stages_divide_the_time_in_which_ranks_wait():
    for num_stages, num_virtual, microbatches in PIPELINES:
        schedules = all_turns(microbatches, num_stages, num_virtual)
        time = Simulation(schedules, num_virtual, limit=num_stages, cost=1 / num_virtual).run()
        busy = 3 * microbatches
        assert time is not None
        assert (time - busy) / busy == pytest.approx((num_stages - 1) / (num_virtual * microbatches))
        passes = forward_turns(range(microbatches), Place(0, num_stages, num_virtual))
        forwards = [Turn("forward", *each) for each in passes]
        time = Simulation([forwards] * num_stages, num_virtual, limit=num_stages, cost=1 / num_virtual).run()
        assert time == pytest.approx(microbatches + (num_stages - 1) / num_virtual)


def test_links_that_meet_at_a_rank_have_separate_groups():
    for num_stages in range(2, 10):
        groups = groups_of_links(num_stages, 2)
        assert len(groups) == num_stages
        assert all(one != other for one, other in zip(groups, [*groups[1:], groups[0]], strict=True))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [0, 1, 2, 3, 4, 7, 8])
def test_without_virtual_stages_any_number_of_microbatches_ends(num_stages: int, microbatches: int):
    schedules = all_turns(microbatches, num_stages, 1)
    for rank, schedule in enumerate(schedules):
        for direction in ("forward", "backward"):
            assert [turn.microbatch for turn in schedule if turn.direction == direction] == list(range(microbatches))
        assert most_in_flight(schedule) == min(num_stages - rank, microbatches)
    assert Simulation(schedules, 1, limit=num_stages).run() is not None


def test_without_stages_each_forward_pass_is_followed_by_its_backward_pass():
    expected = [Turn("forward", 0), Turn("backward", 0), Turn("forward", 1), Turn("backward", 1)]
    assert list(pipeline_turns(2, None)) == expected
    assert turns(3, 0, 2)[:4] == [Turn("forward", 0), Turn("forward", 1), Turn("backward", 0), Turn("forward", 2)]
    assert list(forward_turns(range(3), None)) == [(0, 0), (1, 0), (2, 0)]


def test_two_ranks_interleave_two_virtual_stages():
    # Narayanan et al. 2021, figure 4, for two ranks: virtual stages in groups of two microbatches.
    names = ["f" if turn.direction == "forward" else "b" for turn in turns(4, 0, 2, 2)]
    assert "".join(names) == "ffff" + "fb" * 4 + "bbbb"
    assert [(turn.microbatch, turn.virtual) for turn in turns(4, 1, 2, 2) if turn.direction == "backward"] == [
        *((0, 1), (1, 1), (0, 0), (1, 0)),
        *((2, 1), (3, 1), (2, 0), (3, 0)),
    ]

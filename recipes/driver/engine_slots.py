"""EngineSlots: which generation may give rows to which engine, if several run at the same time.

Batches that are drawn ahead share the engines, each with its own router. Every generation has a turn: the step that
waits for it, and its place among those that this step waits for. Invariants
(tests/unit/recipes/driver/test_engine_slots.py, test_router.py):

1. a generation gives rows to an engine only while no generation with an earlier turn is expected, or has rows that wait
   for an engine or are being sent to one. Engines run rows in the order in which they got them, so no row of a later
   batch comes before one of an earlier batch, unless it is from a second generation of the batch, as in ReMax. Rows in
   flight are never moved;
2. an engine has fewer than `capacity` rows of all generations together in flight when it gets a group. So a row that
   an earlier batch has to generate again waits for the next free place, and for nothing that was queued meanwhile;
3. a group goes to the engine with the fewest tokens in flight, of all generations together.

A later generation waits for the rows of earlier ones only until these are in flight. So its wait ends as the calls of
engines do; generations of earlier turns never wait for it.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rlpack.recipes.driver.engine_load import EngineLoad

# The step that waits for a generation, and the place among those that the step waits for.
Turn = tuple[int, int]


def turn_of_batch(step: int) -> Turn:
    """Return the turn of the batch of a step."""
    return (step, 0)


def turn_of_evaluation(step: int) -> Turn:
    """Return the turn of the evaluation that ends while a step trains: the step has taken its batch by then."""
    return (step, 1)


class EngineSlots:
    """The rows that wait and those in flight, of all generations."""

    def __init__(self, load: EngineLoad, *, are_concurrent: bool) -> None:
        """Start without rows.

        Args:
            load: counts the rows in flight and those that wait.
            are_concurrent: whether generations run at the same time; otherwise, one that begins supersedes those that
                were given up.
        """
        self._load, self._are_concurrent = load, are_concurrent
        self._changed = threading.Condition()
        self._expected: set[Turn] = set()
        self._shares: list[EngineShare] = []
        self._num_changes = 0

    def expect(self, turn: Turn) -> None:
        """Keep later turns waiting for a generation of this turn, which its own thread is about to begin."""
        with self._changed:
            self._expected.add(turn)

    def expect_no_more(self, turn: Turn) -> None:
        """Stop waiting for a generation of this turn, if none has begun."""
        with self._changed:
            self._expected.discard(turn)
            self._tell()

    @contextmanager
    def share(self, turn: Turn, rows: int, ranks: Iterable[int], capacity: int) -> "Iterator[EngineShare]":
        """Yield a generation's share of the engines; its rows no longer count after the block.

        Args:
            turn: turn of the generation.
            rows: number of rows that wait.
            ranks: ranks of the engines.
            capacity: rows that an engine runs at once.
        """
        share = EngineShare(self, turn, rows, ranks, capacity)
        with self._changed:
            if not self._are_concurrent:
                for given_up in self._shares:
                    given_up._forget()
                self._shares.clear()
            self._expected.discard(turn)
            self._shares.append(share)
            share._begin()
        try:
            yield share
        finally:
            with self._changed:
                if share in self._shares:
                    self._shares.remove(share)
                    share._forget()
                self._tell()

    def _tell(self) -> None:
        """Wake generations that wait for room or their turn."""
        self._num_changes += 1
        self._changed.notify_all()


class EngineShare:
    """One generation's share of the engines."""

    def __init__(self, slots: EngineSlots, turn: Turn, rows: int, ranks: Iterable[int], capacity: int) -> None:
        """Create a share; call `EngineSlots.share` instead of this."""
        self._slots, self._turn, self._waiting, self._capacity = slots, turn, rows, capacity
        self._rows: Counter[int] = Counter(dict.fromkeys(ranks, 0))
        self._tokens: Counter[int] = Counter()
        self._seen, self._is_taking, self._is_sending = 0, False, False

    def take(self, ranks: Iterable[int], rows: int, tokens: int) -> int | None:
        """Give rows that wait to the engine with the fewest tokens in flight; return its rank. `sent` has to follow.

        Args:
            ranks: ranks that may get them.
            rows: number of rows.
            tokens: tokens of their prompts and longest possible responses together.

        Returns:
            The rank; None if no engine has room, or if it is another generation's turn.
        """
        with self._slots._changed:
            if not self._is_taking:
                self._is_taking, self._seen = True, self._slots._num_changes
            if not self._is_first():
                return None
            open_ranks = [rank for rank in ranks if self._in_flight(rank) < self._capacity]
            if not open_ranks:
                return None
            rank = min(open_ranks, key=lambda rank: (sum(one._tokens[rank] for one in self._slots._shares), rank))
            self._is_sending = True
            self._wait_for_room(-rows)
            self._add(rank, rows, tokens)
            return rank

    def sent(self) -> None:
        """Note that the engines have all rows that they were given."""
        with self._slots._changed:
            self._is_taking = False
            if self._is_sending:
                self._is_sending = False
                self._slots._tell()

    def release(self, rank: int, rows: int, tokens: int) -> None:
        """Note that rows are no longer in flight on a rank."""
        with self._slots._changed:
            self._add(rank, -rows, -tokens)
            self._slots._tell()

    def queue(self, rows: int) -> None:
        """Note that more rows wait: they have to be generated again."""
        with self._slots._changed:
            self._wait_for_room(rows)

    def rows_to_room(self, rank: int) -> int:
        """Return how many rows of a rank have to end so that it has room for rows that wait; 0 if none wait."""
        with self._slots._changed:
            if not any(share._waiting for share in self._slots._shares):
                return 0
            return max(1, self._in_flight(rank) - self._capacity + 1)

    def wait(self, timeout_s: float) -> None:
        """Wait until a generation has made room, or has no more waiting rows, since the first `take` before `sent`."""
        with self._slots._changed:
            self._slots._changed.wait_for(lambda: self._slots._num_changes != self._seen, timeout_s)

    def _is_first(self) -> bool:
        """Return whether no earlier turn has rows that are not in flight, or is expected."""
        earlier = (share._turn for share in self._slots._shares if share._waiting or share._is_sending)
        return all(turn >= self._turn for turn in (*earlier, *self._slots._expected))

    def _in_flight(self, rank: int) -> int:
        return sum(share._rows[rank] for share in self._slots._shares)

    def _begin(self) -> None:
        self._slots._load.queue(self._waiting)
        for rank in self._rows:
            self._slots._load.add(rank, 0)

    def _wait_for_room(self, rows: int) -> None:
        self._waiting += rows
        self._slots._load.queue(rows)

    def _add(self, rank: int, rows: int, tokens: int) -> None:
        self._rows[rank] += rows
        self._tokens[rank] += tokens
        self._slots._load.add(rank, rows)

    def _forget(self) -> None:
        """Stop counting this share's rows."""
        self._slots._load.queue(-self._waiting)
        for rank, rows in self._rows.items():
            self._slots._load.add(rank, -rows)

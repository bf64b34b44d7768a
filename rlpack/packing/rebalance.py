"""Make microbatches that meet at one index alike: exchange rows until no exchange helps.

Sharded data parallelism waits at every microbatch index for the dearest one, so what counts is how far each microbatch
is over the goal of its index: its mean, or its dearest row. A sweep goes from those furthest over theirs down; each
gives rows to one of those furthest below:

- one row, for nothing or for a cheaper row;
- or one row for two, which take about as many slots and, attention being quadratic, cost less.

Every exchange makes the sum of squared distances from the goals smaller, and none lets a microbatch pass the budget.
"""

from typing import NamedTuple

import numpy as np

from rlpack.packing.algorithms.jit import compiled
from rlpack.packing.algorithms.sorting import ascending
from rlpack.packing.analysis.cost import lockstep_cost

# A microbatch this close to its goal, as a part of it, is left alone.
_CLOSE = 2**12
_MAX_SWEEPS = 32
_PATIENCE = 3
# Parts of what an exchange could gain at most, from which on others are not looked for.
_ALMOST, _GOOD = 0.95, 0.75
_WINDOW = 12
# A sweep first sorts the bins, which takes as long as to look at so many exchanges for each.
_SORT_WORK = 16
# Of large bins, a part of the rows is tried against all pairs of the other bin's rows: about so many of both.
_PAIRS = 2**11


class _Exchange(NamedTuple):
    """Rows that would change places, as positions among the members of their bins; -1 is none."""

    gain: float
    receiver: int
    given: int
    taken: int
    also_taken: int


class _Pair(NamedTuple):
    """Two bins: the giver is `gap` further over its goal than the receiver."""

    giver: int
    receiver: int
    gap: int
    capacity: int


class _Members(NamedTuple):
    """The items of each bin, cheapest first, in one array with room to grow."""

    items: np.ndarray
    start: np.ndarray
    sizes: np.ndarray


def rebalance(
    labels: np.ndarray,
    slots: np.ndarray,
    costs: np.ndarray,
    *,
    ranks: int,
    num_bins: int,
    capacity: int,
    enough: float = 0.0,
    work: int = 2**62,
) -> tuple[np.ndarray, int]:
    """Exchange items between bins to lower Σ_i max_rank cost(rank, i).

    Args:
        labels: bin of each item, int64 [I].
        slots: slots of each item, int64 [I].
        costs: integer cost of each item, int64 [I].
        ranks: number of bins that meet at one index, when bins are dealt in order of cost.
        num_bins: number of bins.
        capacity: most slots of a bin.
        enough: lock-step cost at which to stop.
        work: about how many exchanges to try; counted, not timed, so that plans are the same on every machine.

    Returns:
        The labels with the lowest lock-step cost seen, int64 [I], and the work that is left.
    """
    if labels.size == 0 or num_bins < 2 or ranks < 2:
        return labels, work
    loads = np.bincount(labels, weights=costs, minlength=num_bins).astype(np.int64)
    lowest, idle = lockstep_cost(loads, ranks), 0
    if lowest <= enough:
        return labels, work
    members = _gather(labels, ascending(costs), num_bins)
    used = np.bincount(labels, weights=slots, minlength=num_bins).astype(np.int64)
    for _ in range(_MAX_SWEEPS):
        by_cost = np.argsort(-loads, kind="stable")
        goals = _goals(members, costs, loads, by_cost, ranks)
        queue = np.argsort(goals - loads, kind="stable")
        limits = (capacity, work - _SORT_WORK * num_bins)
        num_exchanges, work = _sweep(members, slots, costs, used, loads, (goals, queue), limits)
        if not num_exchanges:
            break
        cost = lockstep_cost(loads, ranks)
        # The squares may keep shrinking while the costliest bin of each index, which alone counts, stays the same.
        idle = 0 if cost + cost // _CLOSE < lowest else idle + 1
        if cost < lowest:
            lowest, labels = cost, _labels(members, labels.size)
        if idle == _PATIENCE or lowest <= enough or work <= 0:
            break
    return labels, work


def _gather(labels: np.ndarray, order: np.ndarray, bins: int) -> _Members:
    """Return the members of each bin, items in `order`."""
    counts = np.bincount(labels, minlength=bins)
    ends = np.cumsum(counts + counts // 2 + 8)
    start = np.concatenate(([0], ends))
    items = np.full(int(ends[-1]), -1)
    grouped = order[ascending(labels[order])]
    first = np.cumsum(counts) - counts
    sorted_labels = labels[grouped]
    items[start[sorted_labels] + np.arange(grouped.size) - first[sorted_labels]] = grouped
    return _Members(items, start, counts)


def _labels(members: _Members, size: int) -> np.ndarray:
    """Return the bin of each of `size` items."""
    labels = np.empty(size, dtype=np.int64)
    _write_labels(members, labels)
    return labels


def _goals(members: _Members, costs: np.ndarray, loads: np.ndarray, dealt: np.ndarray, ranks: int) -> np.ndarray:
    """Return the load that each bin should have: that of the dearest row of its index, or the index's mean if higher.

    No exchange makes an index cheaper than its dearest row: up to there its bins hold more for nothing, and the other
    indices less. `dealt` has bins, dearest first.
    """
    starts = np.arange(0, loads.size, ranks)
    dearest = np.where(members.sizes > 0, costs[members.items[members.start[:-1] + members.sizes - 1]], 0)
    means = np.add.reduceat(loads[dealt], starts) // ranks
    goals = np.empty_like(loads)
    at_index = np.maximum(means, np.maximum.reduceat(dearest[dealt], starts))
    goals[dealt] = np.repeat(at_index, ranks)[: loads.size]
    return goals


@compiled
def _write_labels(members: _Members, labels: np.ndarray) -> None:
    """Write each member's bin into `labels`."""
    for label in range(members.sizes.size):
        for at in range(members.start[label], members.start[label] + members.sizes[label]):
            labels[members.items[at]] = label


@compiled
def _sweep(
    members: _Members,
    slots: np.ndarray,
    costs: np.ndarray,
    used: np.ndarray,
    loads: np.ndarray,
    targets: tuple[np.ndarray, np.ndarray],
    limits: tuple[int, int],
) -> tuple[int, int]:
    """Let each bin that is over its goal, the furthest first, make its best exchange.

    `targets` are the goals, and bins by their excess over them; `limits` are the slots of a bin, and how many exchanges
    may be looked at. Returns how many were made, and how many more may be looked at. Loads, used slots and members are
    updated.
    """
    goals, queue = targets
    capacity, work = limits
    made, below = 0, 0
    while below < queue.size and loads[queue[queue.size - 1 - below]] < goals[queue[queue.size - 1 - below]]:
        below += 1
    for at in range(queue.size):
        giver = queue[at]
        over = loads[giver] - goals[giver]
        if below == 0 or over * _CLOSE <= goals[giver] or work <= 0:
            break
        best = _Exchange(0.0, -1, -1, -1, -1)
        for step in range(min(_WINDOW, below)):
            receiver = queue[queue.size - 1 - (at + step) % below]
            under = loads[receiver] - goals[receiver]
            pair = _Pair(int(giver), int(receiver), int(over - under), capacity)
            most = 0.5 * pair.gap * pair.gap  # what an exchange of these two could gain
            if under < 0 and best.gain < _ALMOST * most:
                best = _one_for_one(members, slots, costs, used, pair, best)
                work -= members.sizes[giver] + members.sizes[receiver]
            if under < 0 and best.gain < _GOOD * most:
                best = _one_for_two(members, slots, costs, used, pair, best)
                work -= min(members.sizes[giver] * members.sizes[receiver], _PAIRS)
        if best.receiver >= 0:
            _exchange(members, slots, costs, used, loads, giver, best)
            made += 1
    return made, int(work)


@compiled
def _one_for_one(
    members: _Members, slots: np.ndarray, costs: np.ndarray, used: np.ndarray, pair: _Pair, best: _Exchange
) -> _Exchange:
    """Return the best exchange of one row for nothing or for one row, or `best`.

    To move a cost of d over a gap of g makes the sum of squares smaller by 2·d·(g − d): most at g / 2.
    """
    ours, theirs = members.start[pair.giver], members.start[pair.receiver]
    our_count, their_count = members.sizes[pair.giver], members.sizes[pair.receiver]
    can_grow = our_count > 1 and theirs + their_count < members.start[pair.receiver + 1]
    at = -1  # the last of their rows that leaves half the gap or more to be moved; the next one leaves less
    for given in range(our_count):
        row = members.items[ours + given]
        while at + 1 < their_count and 2 * (costs[row] - costs[members.items[theirs + at + 1]]) >= pair.gap:
            at += 1
        for taken in range(at, min(at + 2, their_count)):
            if taken < 0 and not can_grow:
                continue
            back = members.items[theirs + max(taken, 0)]
            moved = costs[row] - (costs[back] if taken >= 0 else 0)
            grown = slots[row] - (slots[back] if taken >= 0 else 0)
            gain = 2.0 * moved * (pair.gap - moved)
            # A group may cost less than another and still have more slots: the giver can grow too.
            fits = used[pair.receiver] + grown <= pair.capacity and used[pair.giver] - grown <= pair.capacity
            if gain > best.gain and fits:
                best = _Exchange(float(gain), pair.receiver, given, taken, -1)
    return best


@compiled
def _one_for_two(
    members: _Members, slots: np.ndarray, costs: np.ndarray, used: np.ndarray, pair: _Pair, best: _Exchange
) -> _Exchange:
    """Return the best exchange of one row for two, or `best`."""
    ours, theirs = members.start[pair.giver], members.start[pair.receiver]
    our_count, their_count = members.sizes[pair.giver], members.sizes[pair.receiver]
    if ours + our_count >= members.start[pair.giver + 1]:
        return best
    stride = 1 + our_count * their_count // _PAIRS
    for given in range(our_count % stride, our_count, stride):
        row = members.items[ours + given]
        low, high = 0, their_count - 1
        while low < high:
            one, two = members.items[theirs + low], members.items[theirs + high]
            moved = costs[row] - costs[one] - costs[two]
            grown = slots[row] - slots[one] - slots[two]
            gain = 2.0 * moved * (pair.gap - moved)
            fits = used[pair.receiver] + grown <= pair.capacity and used[pair.giver] - grown <= pair.capacity
            if gain > best.gain and fits:
                best = _Exchange(float(gain), pair.receiver, given, low, high)
            if 2 * moved > pair.gap:
                low += 1
            else:
                high -= 1
    return best


@compiled
def _exchange(
    members: _Members,
    slots: np.ndarray,
    costs: np.ndarray,
    used: np.ndarray,
    loads: np.ndarray,
    giver: int,
    chosen: _Exchange,
) -> None:
    """Carry an exchange out."""
    receiver = chosen.receiver
    given = _take(members, giver, chosen.given)
    also = _take(members, receiver, chosen.also_taken)  # the later one first, so that the other keeps its position
    taken = _take(members, receiver, chosen.taken)
    for item, source, target in ((given, giver, receiver), (taken, receiver, giver), (also, receiver, giver)):
        if item >= 0:
            _put(members, costs, target, item)
            loads[source] -= costs[item]
            loads[target] += costs[item]
            used[source] -= slots[item]
            used[target] += slots[item]


@compiled
def _take(members: _Members, label: int, position: int) -> int:
    """Remove and return the member at a position of a bin; nothing at -1."""
    if position < 0:
        return -1
    first, last = members.start[label] + position, members.start[label] + members.sizes[label] - 1
    item = members.items[first]
    for at in range(first, last):
        members.items[at] = members.items[at + 1]
    members.sizes[label] -= 1
    return int(item)


@compiled
def _put(members: _Members, costs: np.ndarray, label: int, item: int) -> None:
    """Add a member to a bin, in order of cost."""
    at = members.start[label] + members.sizes[label]
    while at > members.start[label] and costs[members.items[at - 1]] > costs[item]:
        members.items[at] = members.items[at - 1]
        at -= 1
    members.items[at] = item
    members.sizes[label] += 1

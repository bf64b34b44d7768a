"""Rebalancing: exchange items between bins until the bins of each index cost about the same.

Sharded data parallelism waits at every microbatch index for the costliest bin. Each bin has a goal: the mean of its
index, or the costliest item there if that is higher. A sweep visits the bins by decreasing excess over their goals, and
each makes one exchange with one of the bins furthest below theirs:

- one item, for nothing or for a cheaper one;
- or one item for two, which take about as many slots and, attention being quadratic, cost less.

Invariants:

1. Every exchange reduces the sum of squared distances from the goals.
2. No bin exceeds the capacity, and no bin becomes empty.

`tests/unit/packing/test_rebalance.py` asserts the second, and that a step never becomes longer.
"""

from typing import NamedTuple

import numpy as np

from rlpack.packing.algorithms.jit import compiled
from rlpack.packing.algorithms.sorting import ascending
from rlpack.packing.analysis.cost import lockstep_cost

# A bin within one part in this many of its goal is not changed.
_CLOSE = 2**12
_MAX_SWEEPS = 32
_PATIENCE = 3
# No further one-for-one (one-for-two) exchange is searched once the best gain is this fraction of the largest possible.
_ALMOST, _GOOD = 0.95, 0.75
_WINDOW = 12
# Sorting the bins before a sweep takes as long as trying this many exchanges per bin.
_SORT_WORK = 16
# In large bins only a sample of the items is tried against the pairs of the other bin: about this many combinations.
_PAIRS = 2**11


class _Exchange(NamedTuple):
    """An exchange of items, which are positions among the members of their bins; -1 is none."""

    gain: float
    receiver: int
    donated: int
    first_return: int
    second_return: int


class _Pair(NamedTuple):
    """Two bins that may exchange items; the donor's excess over its goal exceeds the receiver's by `gap`."""

    donor: int
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
        # The squares may keep shrinking while the costliest bin of each index, which sets the cost, stays the same.
        idle = 0 if cost + cost // _CLOSE < lowest else idle + 1
        if cost < lowest:
            lowest, labels = cost, _labels(members, labels.size)
        if idle == _PATIENCE or lowest <= enough or work <= 0:
            break
    return labels, work


def _gather(labels: np.ndarray, order: np.ndarray, bins: int) -> _Members:
    """Return the members of each bin, in `order`."""
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


def _goals(members: _Members, costs: np.ndarray, loads: np.ndarray, by_cost: np.ndarray, ranks: int) -> np.ndarray:
    """Return the goal of each bin, int64 [K]: the larger of its index's mean and its index's costliest item.

    No exchange makes an index cheaper than its costliest item. Filling its bins up to that cost is free and unloads the
    other indices. `by_cost` has the bins, costliest first.
    """
    starts = np.arange(0, loads.size, ranks)
    costliest = np.where(members.sizes > 0, costs[members.items[members.start[:-1] + members.sizes - 1]], 0)
    means = np.add.reduceat(loads[by_cost], starts) // ranks
    goals = np.empty_like(loads)
    at_index = np.maximum(means, np.maximum.reduceat(costliest[by_cost], starts))
    goals[by_cost] = np.repeat(at_index, ranks)[: loads.size]
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
    """Let each bin above its goal make its best exchange, the bin furthest above its goal first.

    `targets` are the goals, and the bins by decreasing excess over them; `limits` are the slots of a bin, and the
    number of exchanges to try. Members, used slots and loads are updated in place.

    Returns:
        The number of exchanges, and the number that may still be tried.
    """
    goals, queue = targets
    capacity, work = limits
    num_exchanges, below = 0, 0
    while below < queue.size and loads[queue[queue.size - 1 - below]] < goals[queue[queue.size - 1 - below]]:
        below += 1
    for at in range(queue.size):
        donor = queue[at]
        over = loads[donor] - goals[donor]
        if below == 0 or over * _CLOSE <= goals[donor] or work <= 0:
            break
        best = _Exchange(0.0, -1, -1, -1, -1)
        for step in range(min(_WINDOW, below)):
            receiver = queue[queue.size - 1 - (at + step) % below]
            under = loads[receiver] - goals[receiver]
            pair = _Pair(int(donor), int(receiver), int(over - under), capacity)
            most = 0.5 * pair.gap * pair.gap  # the largest possible gain of these two
            if under < 0 and best.gain < _ALMOST * most:
                best = _one_for_one(members, slots, costs, used, pair, best)
                work -= members.sizes[donor] + members.sizes[receiver]
            if under < 0 and best.gain < _GOOD * most:
                best = _one_for_two(members, slots, costs, used, pair, best)
                work -= min(members.sizes[donor] * members.sizes[receiver], _PAIRS)
        if best.receiver >= 0:
            _exchange(members, slots, costs, used, loads, donor, best)
            num_exchanges += 1
    return num_exchanges, int(work)


@compiled
def _one_for_one(
    members: _Members, slots: np.ndarray, costs: np.ndarray, used: np.ndarray, pair: _Pair, best: _Exchange
) -> _Exchange:
    """Return the best exchange of one item for at most one, or `best` if none is better.

    Moving a cost of d over a gap of g reduces the sum of squares by 2·d·(g − d), which is largest at d = g / 2.
    """
    ours, theirs = members.start[pair.donor], members.start[pair.receiver]
    our_count, their_count = members.sizes[pair.donor], members.sizes[pair.receiver]
    can_grow = our_count > 1 and theirs + their_count < members.start[pair.receiver + 1]
    at = -1  # their last item for which at least half the gap is moved; the next one moves less
    for donated in range(our_count):
        item = members.items[ours + donated]
        while at + 1 < their_count and 2 * (costs[item] - costs[members.items[theirs + at + 1]]) >= pair.gap:
            at += 1
        for first_return in range(at, min(at + 2, their_count)):
            if first_return < 0 and not can_grow:
                continue
            back = members.items[theirs + max(first_return, 0)]
            moved = costs[item] - (costs[back] if first_return >= 0 else 0)
            grown = slots[item] - (slots[back] if first_return >= 0 else 0)
            gain = 2.0 * moved * (pair.gap - moved)
            # A group may cost less than another and still have more slots: the donor can grow too.
            fits = used[pair.receiver] + grown <= pair.capacity and used[pair.donor] - grown <= pair.capacity
            if gain > best.gain and fits:
                best = _Exchange(float(gain), pair.receiver, donated, first_return, -1)
    return best


@compiled
def _one_for_two(
    members: _Members, slots: np.ndarray, costs: np.ndarray, used: np.ndarray, pair: _Pair, best: _Exchange
) -> _Exchange:
    """Return the best exchange of one item for two, or `best` if none is better."""
    ours, theirs = members.start[pair.donor], members.start[pair.receiver]
    our_count, their_count = members.sizes[pair.donor], members.sizes[pair.receiver]
    if ours + our_count >= members.start[pair.donor + 1]:
        return best
    stride = 1 + our_count * their_count // _PAIRS
    for donated in range(our_count % stride, our_count, stride):
        item = members.items[ours + donated]
        low, high = 0, their_count - 1
        while low < high:
            one, two = members.items[theirs + low], members.items[theirs + high]
            moved = costs[item] - costs[one] - costs[two]
            grown = slots[item] - slots[one] - slots[two]
            gain = 2.0 * moved * (pair.gap - moved)
            fits = used[pair.receiver] + grown <= pair.capacity and used[pair.donor] - grown <= pair.capacity
            if gain > best.gain and fits:
                best = _Exchange(float(gain), pair.receiver, donated, low, high)
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
    donor: int,
    chosen: _Exchange,
) -> None:
    """Apply an exchange, updating members, used slots and loads in place."""
    receiver = chosen.receiver
    donated = _remove(members, donor, chosen.donated)
    second = _remove(members, receiver, chosen.second_return)  # the later one first: it does not shift the other
    first = _remove(members, receiver, chosen.first_return)
    for item, source, target in ((donated, donor, receiver), (first, receiver, donor), (second, receiver, donor)):
        if item >= 0:
            _insert(members, costs, target, item)
            loads[source] -= costs[item]
            loads[target] += costs[item]
            used[source] -= slots[item]
            used[target] += slots[item]


@compiled
def _remove(members: _Members, label: int, position: int) -> int:
    """Remove and return the member at a position of a bin; return -1 for position -1."""
    if position < 0:
        return -1
    first, last = members.start[label] + position, members.start[label] + members.sizes[label] - 1
    item = members.items[first]
    for at in range(first, last):
        members.items[at] = members.items[at + 1]
    members.sizes[label] -= 1
    return int(item)


@compiled
def _insert(members: _Members, costs: np.ndarray, label: int, item: int) -> None:
    """Insert a member into a bin, in order of cost."""
    at = members.start[label] + members.sizes[label]
    while at > members.start[label] and costs[members.items[at - 1]] > costs[item]:
        members.items[at] = members.items[at - 1]
        at -= 1
    members.items[at] = item
    members.sizes[label] += 1

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.data.sampler import epoch_order, prompt_positions, row_seeds, splitmix64

few = settings(max_examples=60, deadline=None)


def test_splitmix64_gives_the_published_sequence():
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + k * gamma) % 2**64 for k in range(5)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


@few
@given(st.integers(0, 2**70), st.integers(0, 5), st.integers(1, 50))
def test_every_epoch_is_a_permutation(seed, epoch, size):
    assert np.sort(epoch_order(seed, epoch, size)).tolist() == list(range(size))


@few
@given(st.integers(0, 9), st.integers(1, 12), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_the_prompts_of_a_run_do_not_depend_on_where_it_was_interrupted(seed, size, start, first, second):
    whole = prompt_positions(seed, size, start, first + second)
    parts = [prompt_positions(seed, size, start, first), prompt_positions(seed, size, start + first, second)]
    for axis in range(2):
        assert np.concatenate([part[axis] for part in parts]).tolist() == whole[axis].tolist()


@few
@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 4))
def test_every_epoch_visits_every_row_once(seed, size, epochs):
    epoch, row = prompt_positions(seed, size, 0, size * epochs)
    assert epoch.tolist() == np.repeat(np.arange(epochs), size).tolist()
    assert (np.bincount(row, minlength=size) == epochs).all()


def test_epochs_and_seeds_give_other_orders():
    orders = {tuple(epoch_order(seed, epoch, 20).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_never_changes():
    """With another order, old runs would resume with other prompts."""
    words = np.random.Philox(key=np.array([3, 1], dtype=np.uint64)).random_raw(5)
    slow = sorted(range(5), key=lambda row: int(words[row]))
    assert epoch_order(3, 1, 5).tolist() == slow


def test_orders_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(1, 0, 4)[0] = 3


@pytest.mark.parametrize(("size", "start", "count"), [(0, 0, 1), (3, -1, 1), (3, 0, -1)])
def test_positions_outside_a_run_are_refused(size, start, count):
    with pytest.raises(ValueError, match=f"size={size}, start={start}, count={count}"):
        prompt_positions(1, size, start, count)


def test_seeds_do_not_depend_on_other_rows():
    positions = np.array([5, 0, 9])
    seeds = row_seeds(1, 7, positions, 4).reshape(3, 4)
    alone = [row_seeds(1, 7, positions[k : k + 1], 4).tolist() for k in range(3)]
    assert seeds.tolist() == alone
    assert row_seeds(1, 7, positions, 2).reshape(3, 2).tolist() == seeds[:, :2].tolist()


def test_seeds_of_all_runs_steps_rows_and_samples_differ():
    seeds = [row_seeds(seed, step, np.arange(50), 8) for seed in range(5) for step in range(5)]
    assert np.unique(np.concatenate(seeds)).size == 5 * 5 * 50 * 8


def test_bits_of_seeds_are_balanced():
    bits = np.unpackbits(row_seeds(1, 0, np.arange(2_000), 4).view(np.uint8)).reshape(-1, 64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(8_000)

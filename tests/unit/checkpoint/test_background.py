from pathlib import Path

import pytest
import torch

from rlpack.checkpoint.background import BackgroundSaver
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.sharded import load_training_state
from tests.unit.checkpoint.test_sharded import one_rank, step, training, weights

__all__ = ["one_rank"]
pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_save_has_the_state_at_its_start_and_training_goes_on(tmp_path: Path):
    saver, saved, straight = BackgroundSaver(), training(), training()
    for number in range(1, 6):
        saver.start(*saved, tmp_path / str(number), timeout_s=60)
        before = weights(saved[0])
        step(*saved, number)  # while the state is being written
        step(*straight, number)
        saver.wait(60)
        assert saver.is_done()
        loaded = training(seed=1)
        load_training_state(*loaded, tmp_path / str(number))
        assert all(map(torch.equal, weights(loaded[0]), before))
        step(*loaded, number)
        for found, expected in ((loaded, saved), (saved, straight)):
            assert all(map(torch.equal, weights(found[0]), weights(expected[0])))


def test_a_failed_save_is_an_error_of_its_wait_and_the_next_is_written(tmp_path: Path):
    saver, state = BackgroundSaver(), training()
    (tmp_path / "taken").write_text("a file")
    saver.start(*state, tmp_path / "taken", timeout_s=60)
    with pytest.raises(CheckpointError, match=r"saving to .*/taken failed"):
        saver.wait(60)
    saver.wait(60)
    saver.start(*state, tmp_path / "free", timeout_s=60)
    saver.wait(60)
    load_training_state(*training(seed=1), tmp_path / "free")

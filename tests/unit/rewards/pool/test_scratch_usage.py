import math
import os

import pytest

from rlpack.rewards.pool.scratch_usage import scratch_bytes

MIB = 1 << 20


def test_files_folders_and_deleted_files_that_are_open_are_counted(tmp_path):
    (tmp_path / "below" / "it").mkdir(parents=True)
    (tmp_path / "below" / "it" / "file").write_bytes(b"x" * MIB)
    (tmp_path / "link").symlink_to("/usr")
    counted = scratch_bytes(tmp_path, [], math.inf)
    assert MIB <= counted < 1.1 * MIB
    with (tmp_path / "deleted").open("wb") as file:
        file.write(b"x" * MIB)
        file.flush()
        (tmp_path / "deleted").unlink()
        assert scratch_bytes(tmp_path, [os.getpid()], math.inf) >= counted + MIB
    assert scratch_bytes(tmp_path, [], math.inf) == counted


def test_counting_ends_above_the_limit_and_a_directory_that_is_gone_is_empty(tmp_path):
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert scratch_bytes(tmp_path, [], 20_000) < 40_000
    assert scratch_bytes(tmp_path / "gone", [], math.inf) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root can list every directory")
def test_a_closed_directory_counts_as_too_much(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o300)
    assert scratch_bytes(tmp_path, [], 1e9) == math.inf

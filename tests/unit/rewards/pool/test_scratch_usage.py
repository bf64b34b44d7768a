import ctypes
import math
import mmap
import os

import pytest

from rlpack.rewards.pool.scratch_usage import scratch_bytes

MIB = 1 << 20


def test_files_folders_and_deleted_files_that_are_open_are_counted(tmp_path):
    (tmp_path / "below" / "it").mkdir(parents=True)
    (tmp_path / "below" / "it" / "file").write_bytes(b"x" * MIB)
    (tmp_path / "link").symlink_to("/usr")
    counted = scratch_bytes(tmp_path, [], math.inf, MIB)
    assert MIB <= counted < 1.1 * MIB
    with (tmp_path / "deleted").open("wb") as file:
        file.write(b"x" * MIB)
        file.flush()
        (tmp_path / "deleted").unlink()
        assert scratch_bytes(tmp_path, [os.getpid()], math.inf, MIB) >= counted + MIB
    assert scratch_bytes(tmp_path, [], math.inf, MIB) == counted


def test_counting_ends_above_the_limit_and_a_directory_that_is_gone_is_empty(tmp_path):
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert scratch_bytes(tmp_path, [], 50_000, MIB) < 100_000
    assert scratch_bytes(tmp_path / "gone", [], math.inf, MIB) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root can list every directory")
def test_a_closed_directory_counts_as_too_much(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o300)
    assert scratch_bytes(tmp_path, [], 1e9, MIB) == math.inf


def test_deleted_files_that_are_only_mapped_count_as_the_largest_file(tmp_path):
    path = tmp_path / "mapped"
    path.write_bytes(b"x" * MIB)
    libc = ctypes.CDLL(None, use_errno=True)  # mmap.mmap keeps a descriptor
    libc.mmap.restype, length = ctypes.c_void_p, ctypes.c_size_t(mmap.PAGESIZE)
    with path.open("r+b") as file:
        address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
        path.unlink()
        open_too = scratch_bytes(tmp_path, [os.getpid()], math.inf, 64 * MIB)
    assert MIB <= open_too < 64 * MIB
    assert scratch_bytes(tmp_path, [os.getpid()], math.inf, 64 * MIB) >= 64 * MIB
    assert libc.munmap(ctypes.c_void_p(address), length) == 0
    assert scratch_bytes(tmp_path, [os.getpid()], math.inf, 64 * MIB) < MIB

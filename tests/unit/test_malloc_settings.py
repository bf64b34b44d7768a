import platform
import subprocess
import sys

import pytest

# Page faults of ten rounds, each of which allocates 250 blocks of 1.2 MB and frees them. The blocks come from
# malloc itself: a small object of a tensor that stays cached at the heap's end would keep the default from
# returning the memory in some runs.
FAULTS = """
import ctypes, resource, sys
from rlpack.malloc_settings import keep_freed_memory
assert sys.argv[1] == "default" or keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def use():
    held = [libc.malloc(1_200_000) for _ in range(250)]
    for block in held:
        ctypes.memset(block, 0, 1_200_000)
    for block in held:
        libc.free(block)
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(setting: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, setting], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_blocks_of_the_size_of_tensors_reuse_freed_memory():
    assert page_faults("kept") < 0.1 * page_faults("default")

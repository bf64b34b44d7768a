import platform
import subprocess
import sys

import pytest

# Page faults of ten rounds, and resident bytes before them. Each round allocates 250 blocks of 1.2 MB and frees them.
# The blocks come from malloc itself: a small object of a tensor that stays cached at the heap's end would keep the
# default from returning the memory in some runs.
FAULTS = """
import ctypes, resource, sys
from rlpack.malloc_settings import keep_freed_memory, returning_freed_memory
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
if sys.argv[1] == "returned":
    with returning_freed_memory():
        use()
        print(int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize())
    use()
else:
    print(int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize())
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")


def page_faults(setting: str) -> tuple[int, int]:
    """Return the page faults of the rounds, and the resident bytes before them."""
    done = subprocess.run([sys.executable, "-c", FAULTS, setting], capture_output=True, text=True, check=True)
    resident, faults = map(int, done.stdout.split())
    return faults, resident


def test_blocks_of_the_size_of_tensors_reuse_freed_memory():
    assert page_faults("kept")[0] < 0.1 * page_faults("default")[0]


def test_a_start_returns_freed_memory_and_later_rounds_reuse_it():
    (faults, kept), (later, returned) = page_faults("kept"), page_faults("returned")
    assert returned < kept - 150_000_000
    assert later < faults + 1000

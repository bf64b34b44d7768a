import platform
import subprocess
import sys

import pytest

# Page faults of ten rounds, each of which allocates 250 tensors of 1.2 MB and frees them.
FAULTS = """
import resource, sys
from rlpack.distributed.malloc_settings import keep_freed_memory
import torch
assert sys.argv[1] == "default" or keep_freed_memory()
def use():
    held = [torch.empty(300_000).fill_(0) for _ in range(250)]
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
def test_tensors_reuse_the_memory_of_freed_ones():
    assert page_faults("kept") < 0.1 * page_faults("default")

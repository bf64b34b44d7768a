"""What a row of the GPU benchmark yields: figures with their bars."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlpack.gloo import GLOO


@dataclass(frozen=True)
class Setup:
    """Where and at which size a row is measured.

    Attributes:
        device: `cuda` or `cpu`.
        tiny: sizes that a CPU computes in seconds. Bars on time and memory mean nothing then and are not judged.
    """

    device: str
    tiny: bool = False

    def judged(self, is_kept: bool) -> bool | None:
        """Return the verdict on a bar of time or memory; None at tiny sizes."""
        return None if self.tiny else is_kept


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        what: what was measured.
        value: the figure with its unit.
        bar: the bar in words; empty for a figure without one.
        kept: whether the bar is kept; None if the figure has no bar or isn't judged.
    """

    what: str
    value: str
    bar: str = ""
    kept: bool | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict as it is printed."""
        return {True: "kept", False: "MISSED", None: "not judged" if self.bar else ""}[self.kept]


def synchronize(device: str) -> None:
    """Wait until a device has computed everything that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], device: str, *, repeats: int = 10, warm_up: int = 3) -> float:
    """Return the median of the seconds that a call takes, the work that it launches included."""
    for _ in range(warm_up):
        run()
    synchronize(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Run the body in a process group of only this process, as on a run's only rank."""
    with tempfile.TemporaryDirectory() as folder:
        backend = f"cpu:{GLOO},cuda:nccl" if device == "cuda" else GLOO
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()

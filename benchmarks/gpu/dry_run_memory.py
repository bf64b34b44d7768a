"""Row `memory`: the memory that a dry run estimates, over the measured peak of real training steps."""

from collections.abc import Iterator

from benchmarks.gpu.figures import Figure, Setup
from benchmarks.memory_estimate import SETTINGS, Size, compare

ERROR = 0.1


def measure(setup: Setup) -> Iterator[Figure]:
    """Yield the ratio of each setting of one rank."""
    size = Size(128, 2, 64, setup.device) if setup.tiny else Size(1024, 12, 8192, setup.device)
    for name in ("fp32",) if setup.tiny else settings(setup.device):
        one = compare(name, size)
        ratio = one["estimate"] / one["measured"]
        shown = f"{one['estimate']:,.0f} MiB estimated, {one['measured']:,.0f} MiB measured: {ratio:.3f}"
        yield Figure(f"{name}: peak memory", shown, f"within {ERROR:.0%}", setup.judged(abs(ratio - 1) <= ERROR))


def settings(device: str) -> list[str]:
    """Return the settings that run on one device; offloading moves nothing on a CPU."""
    return [
        name
        for name, setting in SETTINGS.items()
        if setting.ranks == 1 and (device == "cuda" or setting.offload == "none")
    ]

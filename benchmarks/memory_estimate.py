"""Compare the memory that a dry run estimates with that of real training steps.

    python benchmarks/memory_estimate.py                    # on CPUs: allocated bytes, and resident memory
    python benchmarks/memory_estimate.py --device cuda      # on one GPU: torch.cuda.max_memory_allocated
    python benchmarks/memory_estimate.py --only lora tp2    # some settings

A rank builds the actor or the critic of a configuration as in a run, and takes two optimizer steps. The peak is that of
the second one: on a CPU the sum of what PyTorch's allocator reports to its profiler, and VmHWM in another process that
returns freed memory at once; on a GPU that of its allocator. The estimate is that of `rlpack train --dry-run` for the
role, without what is assumed for libraries. gloo's own buffers are in the measured peak only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rlpack.config.schema import Actor, Config, Model, Placement, Pool, Recipe
from rlpack.config.sections.optimization import Lora
from rlpack.config.sections.parallelism import Parallel
from rlpack.data.tokenization import character_tokenizer
from rlpack.distributed.context import RankContext
from rlpack.gloo import GLOO
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.inputs import pack_rows
from rlpack.models.memory_simulation import SimulatedMicrobatch
from rlpack.models.policy import TokenScores
from rlpack.recipes.dry_run.role_memory import role_layout, role_memory
from rlpack.recipes.dry_run.run_memory import RoleMemory, role_offload
from rlpack.workers.build import build_critic, build_policy
from rlpack.workers.loss import MicrobatchLoss
from rlpack.workers.optimizer_step import OptimizerStepper

MIB = 2**20
# What cuBLAS takes from PyTorch's allocator on Hopper: 32 MiB for each thread, that of the forward and of the backward
# pass. A dry run counts it with the CUDA context.
CUBLAS_BYTES = 2 * 32 * MIB
# Tell glibc to return memory as soon as it is freed.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Setting:
    """One configuration of a role."""

    ranks: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    cp_method: Literal["ulysses", "all_gather"] = "ulysses"
    role: Literal["actor", "critic"] = "actor"
    checkpointing: str = "none"
    precision: str = "fp32"
    lora: int = 0
    offload: str = "none"
    microbatches: int = 1
    model_type: str = "llama"


SETTINGS = {
    "fp32": Setting(),
    "selective": Setting(checkpointing="selective"),
    "full": Setting(checkpointing="full"),
    "lora": Setting(lora=16),
    "bf16": Setting(precision="bf16"),
    "two microbatches": Setting(microbatches=2),
    "qwen3, bf16, full": Setting(model_type="qwen3", precision="bf16", checkpointing="full"),
    "offload optimizer": Setting(offload="optimizer", precision="bf16", checkpointing="full"),
    "offload parameters": Setting(offload="parameters", precision="bf16", checkpointing="full"),
    "dp2": Setting(2),
    "dp2, two microbatches, bf16": Setting(2, microbatches=2, precision="bf16"),
    "tp2": Setting(2, tp=2),
    "tp2 dp2, two microbatches, bf16": Setting(4, tp=2, microbatches=2, precision="bf16"),
    "cp2": Setting(2, cp=2),
    "pp2": Setting(2, pp=2, microbatches=4),
    "pp2, vpp2": Setting(2, pp=2, vpp=2, microbatches=4),
    "hsdp 2x2": Setting(4, dp_replicate=2),
    "cp2, all_gather": Setting(2, cp=2, cp_method="all_gather"),
    "qwen3_moe": Setting(model_type="qwen3_moe"),
    "ep2, qwen3_moe": Setting(2, ep=2, model_type="qwen3_moe"),
    "ep2 dp2, qwen3_moe, two microbatches, bf16": Setting(
        4, ep=2, microbatches=2, precision="bf16", model_type="qwen3_moe"
    ),
    "critic": Setting(role="critic"),
    "critic, dp2": Setting(2, role="critic"),
}
# Of each layer of a mixture of experts, whose width is a quarter of a dense layer's.
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a microbatch."""

    hidden: int = 512
    layers: int = 12
    tokens: int = 1024
    device: str = "cpu"


def config_of(setting: Setting, size: Size) -> Config:
    """Return the configuration of a setting."""
    shape = {
        "model_type": setting.model_type,
        "hidden_size": size.hidden,
        "intermediate_size": 8 * size.hidden // 3 // 64 * 64,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // 64,
        "num_key_value_heads": size.hidden // 128,
    }
    if setting.model_type == "qwen3_moe":
        shape |= _EXPERTS | {"moe_intermediate_size": shape["intermediate_size"] // 4}
    pool = Pool(ranks=setting.ranks, gpus_per_rank=1.0 if size.device == "cuda" else 0.0)
    compute: dict[str, Any] = {
        "precision": setting.precision,
        "gradient_checkpointing": setting.checkpointing,
        "offload": setting.offload,
        "isolation_check": False,
    }
    sizes = ("tp", "cp", "pp", "vpp", "ep", "dp_replicate", "cp_method")
    actor = Actor(
        **compute, lora=Lora(rank=setting.lora), parallel=Parallel(**{name: getattr(setting, name) for name in sizes})
    )
    recipe = Recipe(target="rlpack.recipes.ppo") if setting.role == "critic" else Recipe()
    return Config(model=Model(config=shape), actor=actor, recipe=recipe, placement=Placement(pools={"main": pool}))


def measure(setting: Setting, size: Size, rank: int, store: str, *, resident: bool) -> dict[str, float]:
    """Run steps on this rank; return the estimated and the measured peak in MiB."""
    torch.set_num_threads(1)
    config, role = config_of(setting, size), setting.role
    tokenizer = character_tokenizer("".join(map(chr, range(0x4E00, 0x4E00 + 8000))))
    shared, longest = size.tokens * setting.cp, size.tokens // 4
    several = setting.microbatches > 1
    memory = role_memory(config, role, tokenizer, SimulatedMicrobatch(shared, longest), several=several)
    estimate = RoleMemory(memory, role_offload(config, role)).peak + (CUBLAS_BYTES if size.device == "cuda" else 0)
    backend = f"cpu:{GLOO},cuda:nccl" if size.device == "cuda" else GLOO
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=setting.ranks)
    context = RankContext("main", rank, role_layout(config, role), size.device)
    begun = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if not resident else None
    if begun is not None and size.device == "cpu":
        begun.__enter__()
    if role == "actor":
        model, optimizer = build_policy(config, role, tokenizer, context), config.actor.optimizer
    else:
        model, optimizer = build_critic(config, tokenizer, context), config.critic.optimizer
    stepper = OptimizerStepper(role, model, optimizer, context)
    inputs = pack_rows([torch.randint(len(tokenizer), (longest,)) for _ in range(4 * setting.cp)]).to(size.device)

    def forward(*_: object) -> TokenScores | Tensor:
        return model(inputs, before_token=True) if isinstance(model, ScalarHeadModel) else model(inputs)

    def loss(scores: TokenScores | Tensor, _: object) -> MicrobatchLoss:
        values = scores if isinstance(scores, Tensor) else scores.logprobs + scores.entropy
        return MicrobatchLoss(values.sum(), {})

    views: list[Any] = [None] * setting.microbatches
    stepper.step(views, forward, loss, 1e-6)
    before = _status("VmRSS")
    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    with torch.profiler.record_function("second step"):
        stepper.step(views, forward, loss, 1e-6)
    if size.device == "cuda":
        measured = torch.cuda.max_memory_allocated() / MIB
    elif begun is not None:
        begun.__exit__(None, None, None)
        measured = _allocated_peak(begun) / MIB
    else:  # gradients of the first step live when the second one begins
        measured = (memory.weights + memory.optimizer + memory.gradients) / MIB + _status("VmHWM") - before
    dist.barrier()
    dist.destroy_process_group()
    return {"estimate": estimate / MIB, "measured": measured}


def _allocated_peak(finished: profile) -> int:
    """Return the most bytes that were allocated at one time in the second step."""
    events = finished.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    began = next(event.start_ns() for event in events if event.name() == "second step")
    live = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda each: each.start_ns()):
        live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  # PyTorch's stubs don't list it
        if event.start_ns() >= began:
            peak = max(peak, live)
    return peak


def _status(field: str) -> float:
    """Return a field of the process's status in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def compare(name: str, size: Size = Size(), *, resident: bool = False) -> dict[str, float]:
    """Return the estimated and the largest measured peak of a setting's ranks, in MiB; they are processes."""
    environment = os.environ | ({**RETURN_MEMORY} if resident else {}) | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(SETTINGS[name].ranks):
            options = {"name": name, "rank": rank, "store": f"{folder}/store", "resident": resident}
            command = [sys.executable, __file__, "--rank-of", json.dumps(options | {"size": asdict(size)})]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {name} failed")
    return max((json.loads(output.splitlines()[-1]) for output in outputs), key=lambda peak: peak["measured"])


def main() -> None:
    """Compare all settings, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--tokens", type=int, default=Size.tokens, help="slots of a microbatch on a rank")
    parser.add_argument("--layers", type=int, default=Size.layers)
    parser.add_argument("--hidden", type=int, default=Size.hidden, help="a multiple of 128")
    parser.add_argument("--rank-of", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (one := arguments.rank_of) is not None:
        setting, size = SETTINGS[one["name"]], Size(**one["size"])
        print(json.dumps(measure(setting, size, one["rank"], one["store"], resident=one["resident"])))
        return
    on_gpu = arguments.device == "cuda"
    size = Size(arguments.hidden, arguments.layers, arguments.tokens, arguments.device)
    print("| setting | estimate | measured | ratio |" + ("" if on_gpu else " resident | ratio |"))
    print("|---|---|---|---|" + ("" if on_gpu else "---|---|"))
    for name in arguments.only:
        if (on_gpu and SETTINGS[name].ranks > 1) or (not on_gpu and SETTINGS[name].offload != "none"):
            continue
        one = compare(name, size)
        cells = [name, *(f"{one[kind]:,.0f} MiB" for kind in ("estimate", "measured"))]
        cells.append(f"{one['estimate'] / one['measured']:.3f}")
        if not on_gpu:
            peak = compare(name, size, resident=True)["measured"]
            cells += [f"{peak:,.0f} MiB", f"{one['estimate'] / peak:.3f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

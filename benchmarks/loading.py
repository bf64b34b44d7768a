"""Measure the peak memory of ranks that load or make a model, in parts or whole, and export it.

    python benchmarks/loading.py                         # 1 B parameters in bf16 files on 4 gloo ranks
    python benchmarks/loading.py --ranks 2 --checks all  # with the checks of a role's model
    python benchmarks/loading.py --checks gradients      # with the one that takes most memory
    python benchmarks/loading.py --tp 2                  # ranks share layers in pairs
    python benchmarks/loading.py --shape llama-1b        # Llama-3.2-1B: its embedding alone is 1,002 MiB
    python benchmarks/loading.py --new                   # a new model of this size, without files
    python benchmarks/loading.py --whole                 # each rank loads (or makes) the whole model, then shards it

A rank's peak is VmHWM above its memory before it opens the files, in MiB. The limit is 1.3 times its part and 512 MiB,
and for a new model its largest weight, too. The model is a Llama with random weights, in
a temporary folder that is deleted at the end.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from rlpack.config.schema import Model
from rlpack.gloo import GLOO
from rlpack.malloc_settings import keep_freed_memory, returning_freed_memory
from rlpack.models import own_attention
from rlpack.models.check_gradients import check_gradients
from rlpack.models.check_rows import RowLimits, gradient_rows, random_rows
from rlpack.models.checks import check_model
from rlpack.models.loading import build_causal_lm
from rlpack.models.model_export import export_model
from rlpack.models.open_model import open_causal_lm, open_new_causal_lm
from rlpack.models.parallel import reshard, shard_model
from rlpack.models.parts import local_part
from rlpack.models.policy import Policy
from rlpack.models.tensor_parallel import split_weights
from rlpack.models.weight_split import WeightSplit

MIB = 2**20
SHAPES: dict[str, dict[str, Any]] = {
    "small-vocabulary": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "llama-1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
# A new file begins once one exceeds this size.
FILE_BYTES = 400 * MIB


@dataclass(frozen=True)
class Peak:
    """The memory and time of one rank, in MiB and seconds."""

    rank: int
    shard: float
    loading: float
    exporting: float
    limit: float
    loading_s: float
    exporting_s: float


def write_model(folder: Path, dtype: torch.dtype, shape: dict[str, Any]) -> int:
    """Write the model tensor by tensor; return its number of parameters."""
    config = AutoConfig.for_model("llama", **shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = dict(AutoModelForCausalLM.from_config(config).named_parameters())  # a tied one once
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, weight in weights.items():
        if sum(tensor.nbytes for tensor in files[-1].values()) > FILE_BYTES:
            files.append({})
        files[-1][name] = torch.empty(weight.shape, dtype=dtype, device="meta")
    index = {}
    for number, shapes in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        values = {name: (0.02 * torch.randn(shape.shape)).to(dtype) for name, shape in shapes.items()}
        save_file(values, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, file)
    size = sum(weight.numel() for weight in weights.values())
    document = {"metadata": {"total_size": size * dtype.itemsize}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return size


def num_parameters(shape: dict[str, Any]) -> int:
    """Return the number of parameters of the model."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).num_parameters()


def memory(field: str) -> float:
    """Return a field of the process's status in MiB: VmHWM, the peak, or VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def new_model(shape: dict[str, Any]) -> Model:
    """Return the settings of a new model, which gets the size of its vocabulary from the tokenizer."""
    settings = {name: size for name, size in shape.items() if name != "vocab_size"}
    return Model(config={"model_type": "llama"} | settings)


def load_model(options: argparse.Namespace, folder: str, mesh: DeviceMesh) -> Policy:
    """Load or make the model on one rank."""
    attention = own_attention.DEFAULT
    shape = options.shape
    model = new_model(shape) if options.new else Model(path=folder)
    if options.whole:
        policy = Policy(build_causal_lm(model, vocab_size=shape["vocab_size"], attention_name=attention))
        shard_model(policy, mesh)
        return policy
    opened = (open_new_causal_lm if options.new else open_causal_lm)(
        model, vocab_size=shape["vocab_size"], attention_name=attention
    )
    policy = Policy(opened.model)
    if options.tp > 1:
        pairs = init_device_mesh("cpu", (options.ranks // options.tp, options.tp), mesh_dim_names=("dp_shard", "tp"))
        policy.weight_split = WeightSplit(pairs["tp"])
        split_weights(policy, policy.weight_split)
        mesh = pairs["dp_shard"]
    shard_model(policy, mesh)
    opened.materialize(policy, "cpu")
    return policy


@torch.no_grad()
def check(policy: Policy, options: argparse.Namespace) -> None:
    """Check the model as a role's start does, or its gradients only."""
    vocab_size = options.shape["vocab_size"]
    policy.measure_outputs()
    if options.checks == "all":
        check_model(policy, "cpu", vocab_size, packed=False)
    else:
        policy.eval()
        rows = random_rows(gradient_rows(policy.uncut.model, RowLimits()), vocab_size, seed=1)
        check_gradients(policy, rows, "cpu", packed=False, role="actor")
    reshard(policy)


def load(rank: int, options: argparse.Namespace, folder: str, peaks: "multiprocessing.Queue[Peak]") -> None:
    """Load, check and export the model on one rank, and report its peaks."""
    torch.set_num_threads(1)
    keep_freed_memory()
    store = f"file://{folder}/store"
    deadline = timedelta(minutes=10)
    dist.init_process_group(GLOO, init_method=store, rank=rank, world_size=options.ranks, timeout=deadline)
    mesh = init_device_mesh("cpu", (options.ranks,))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    start = time.perf_counter()
    with returning_freed_memory():  # as at the start of a role
        policy = load_model(options, folder, mesh)
        seconds = time.perf_counter() - start
        if options.checks:
            check(policy, options)
    shard = sum(local_part(weight).nbytes for weight in policy.parameters()) / MIB
    loading = memory("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    export_model(policy, Path(folder) / "exported", rank=rank, num_ranks=options.ranks)
    exporting_s = time.perf_counter() - start
    largest = max(weight.nbytes for weight in policy.parameters()) / MIB if options.new else 0.0
    limit = 1.3 * shard + 512 + largest
    peaks.put(Peak(rank, shard, loading, memory("VmHWM") - before, limit, seconds, exporting_s))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Write the model, load it on all ranks, and print each rank's peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the weights of each layer")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the files")
    parser.add_argument("--shape", choices=SHAPES, default="small-vocabulary", help="of the model")
    parser.add_argument("--new", action="store_true", help="random weights instead of files")
    parser.add_argument("--whole", action="store_true", help="load or make the whole model on each rank")
    parser.add_argument("--layers", type=int, help="of the model, instead of the shape's")
    parser.add_argument("--checks", choices=["all", "gradients"], help="include the checks of a role's model")
    options = parser.parse_args()
    options.shape = SHAPES[options.shape] | ({"num_hidden_layers": options.layers} if options.layers else {})
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        if options.new:
            print(f"a new model of {num_parameters(options.shape) / 1e9:.2f} B parameters")
        else:
            size = write_model(Path(folder), getattr(torch, options.dtype), options.shape)
            print(f"{size / 1e9:.2f} B parameters, {4 * size / MIB:,.0f} MiB in fp32, files in {options.dtype}")
        peaks: multiprocessing.Queue[Peak] = context.Queue()
        ranks = [context.Process(target=load, args=(rank, options, folder, peaks)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        found = [peaks.get(timeout=1200) for _ in ranks]
        for process in ranks:
            process.join(timeout=60)
    for peak in sorted(found, key=lambda peak: peak.rank):
        print("  ".join(f"{name} {value:,.0f}" for name, value in asdict(peak).items()))


if __name__ == "__main__":
    main()

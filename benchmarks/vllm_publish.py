"""Measure how long vLLM takes to get new weights from rlpack, against its own `reload_weights` of the same tensors.

    python benchmarks/vllm_publish.py [--rounds 7] [--bucket-mib 64] [--layers 17]

Needs vLLM: `make vllm`, then with .venv-vllm/bin/python. The rounds alternate. One of ours gathers the trainer's
weights bucket by bucket, packs and checks each, passes it to vLLM's process, checks the canary and empties the prefix
cache: all that a run does but for Ray's object store and the trainer's own log-probs of the canary. One of vLLM's reads
a safetensors file that is in the page cache.

Memory is the highest resident memory of both processes during a round above that before it, and for ours the two
buffers of shared memory, which are kept from round to round. The canary's share of the time is printed, too: it has no
counterpart in vLLM's reload.
Exits with 1 when a bar is missed: 1.3 times vLLM's time in the median; two buckets above what vLLM takes.
"""

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from rlpack.batch.bucket import pack_bucket
from rlpack.config.schema import Model, Rollout
from rlpack.data.tokenization import character_tokenizer, eos_id, pad_id
from rlpack.distributed.context import RankContext
from rlpack.models.loading import build_causal_lm
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import TOLERANCES, canary_tokens
from rlpack.rollout.engine import Engine
from rlpack.rollout.vllm.deadlines import Deadline
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.rollout.vllm.weight_buffers import WeightBuffers
from rlpack.workers.rollout import RolloutWorker

SLOWEST = 1.3
MOST_BUCKETS = 2
MIB = 2**20
TOKENIZER = character_tokenizer("".join(map(chr, range(0x4E00, 0x4E00 + 12_000))))
CANARY = canary_tokens(len(TOKENIZER))


class Measured(NamedTuple):
    """One round: its time in seconds, the memory that it took in MiB, and the canary's part of the time."""

    seconds: float
    mib: float
    canary_s: float = 0.0


class TimedCanary:
    """The engine's log-probs, with a stopwatch."""

    def __init__(self, engine: VLLMEngine) -> None:
        """Take the place of the engine's method."""
        self.seconds, self._logprobs = 0.0, engine.logprobs
        engine.logprobs = self

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the engine's log-probs."""
        start = time.perf_counter()
        logprobs = self._logprobs(token_ids)
        self.seconds = time.perf_counter() - start
        return logprobs


class Processes:
    """The rank and vLLM's process, whose resident memory counts."""

    def __init__(self, *pids: int) -> None:
        """Watch these."""
        self._folders = [Path(f"/proc/{pid}") for pid in pids]

    def resident_mib(self, field: str) -> float:
        """Return the sum of a field of their status files (VmRSS: now; VmHWM: highest)."""
        texts = [(folder / "status").read_text().splitlines() for folder in self._folders]
        return sum(int(line.split()[1]) / 1024 for text in texts for line in text if line.startswith(field))

    def measure(self, work: Callable[[], None]) -> Measured:
        """Run `work` and return what it took."""
        for folder in self._folders:
            (folder / "clear_refs").write_text("5")  # the highest memory is that of now
        before, start = self.resident_mib("VmRSS"), time.perf_counter()
        work()
        return Measured(time.perf_counter() - start, self.resident_mib("VmHWM") - before)


def new_policy(model: Model, seed: int) -> Policy:
    """Return the trainer's model."""
    tokens = {"vocab_size": len(TOKENIZER), "eos_token_id": eos_id(TOKENIZER), "pad_token_id": pad_id(TOKENIZER)}
    return Policy(build_causal_lm(model, **tokens, seed=seed, attention_name="sdpa"))


@torch.no_grad()
def scores(policy: Policy) -> torch.Tensor:
    """Return the trainer's log-probs of the canary."""
    return policy.probe_wrapped_model(CANARY)


def publish(worker: RolloutWorker, policy: Policy, expected: np.ndarray, *, version: int, bucket_bytes: int) -> None:
    """Send the trainer's weights as a run does."""
    stream = WeightStream(policy, torch.float32, bucket_bytes=bucket_bytes)
    count = len(stream.layout)
    for index in range(count):
        bucket = pack_bucket(stream.gather(index, copy=False), index=index, count=count, version=version)
        worker.load_bucket(bucket, version)
    worker.publish(expected, CANARY, version)


def check_reloaded(engine: VLLMEngine, expected: torch.Tensor) -> None:
    """Fail if vLLM's log-probs of the canary are not those of the weights that it was to reload."""
    gap = (engine.logprobs(CANARY) - expected).abs().max().item()
    assert gap < 1e-3, f"vLLM's log-probs differ by {gap:.3g} nats after its reload"


def reload(engine: VLLMEngine, folder: str) -> None:
    """Have vLLM reload the weights of a folder."""
    call = engine._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    engine._loop.run(call, Deadline(300.0, "the benchmark's own limit"), "reload its weights")


def main() -> int:
    """Measure, print and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--layers", type=int, default=17)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": 640, "num_attention_heads": 10, "num_key_value_heads": 2, "intermediate_size": 2048}
    config = {"model_type": "qwen2", **sizes, "num_hidden_layers": arguments.layers, "tie_word_embeddings": False}
    model = Model(config=config | {"max_position_embeddings": 512})
    policy = new_policy(model, seed=1)
    num_bytes = sum(weight.nbytes for weight in policy.parameters())
    engine = VLLMEngine.from_settings(
        model, Rollout(engine="vllm", kv_cache_gb=0.1), TOKENIZER, device=torch.device("cpu"), seed=2, max_length=64
    )
    try:
        ours, theirs = alternate(engine, policy, arguments.rounds, arguments.bucket_mib * MIB)
    finally:
        engine.close()
    return report(num_bytes, arguments.bucket_mib, ours, theirs)


def alternate(
    engine: VLLMEngine, policy: Policy, rounds: int, bucket_bytes: int
) -> tuple[list[Measured], list[Measured]]:
    """Return the rounds of both, after one of each that is not counted."""
    # Its `policy_version` is a property with a setter; pyright wants an attribute, as the protocol has.
    generator: Engine = engine  # pyright: ignore[reportAssignmentType]
    worker = RolloutWorker(RankContext(), generator, TOKENIZER, canary_tolerance=TOLERANCES[torch.float32])
    worker.check_weights(WeightStream(policy, torch.float32, bucket_bytes=bucket_bytes).layout)
    started = [process.pid for process in engine._started.processes]
    processes = Processes(*(pid for pid in started if pid is not None), os.getpid())
    ours, theirs, canary = [], [], TimedCanary(engine)
    send = partial(publish, worker, policy, scores(policy).numpy(), bucket_bytes=bucket_bytes)
    with tempfile.TemporaryDirectory() as folder:
        reloaded = other_weights(policy, folder)
        for version in range(1, rounds + 2):
            one = processes.measure(partial(send, version=version))
            buffers = engine._sender.buffers
            assert isinstance(buffers, WeightBuffers), "the engine is on a CPU"
            ours.append(one._replace(mib=one.mib + buffers.num_bytes / MIB, canary_s=canary.seconds))
            theirs.append(processes.measure(lambda: reload(engine, folder)))
            check_reloaded(engine, reloaded)
    return ours[1:], theirs[1:]


@torch.no_grad()
def other_weights(policy: Policy, folder: str) -> torch.Tensor:
    """Write weights of the same shapes into a folder, for vLLM's own reload; return their log-probs of the canary."""
    model = copy.deepcopy(policy)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.01)
    save_file(dict(model.model.named_parameters()), Path(folder) / "model.safetensors", metadata={"format": "pt"})
    model.model.config.save_pretrained(folder)
    return scores(model)


def report(num_bytes: int, bucket_mib: int, ours: list[Measured], theirs: list[Measured]) -> int:
    """Print the figures; return 1 if a bar is missed."""
    seconds, their_seconds = (statistics.median(one.seconds for one in rounds) for rounds in (ours, theirs))
    mib, their_mib = (max(one.mib for one in rounds) for rounds in (ours, theirs))
    print(f"{num_bytes / 1e6:.0f} MB of fp32 weights, buckets of {bucket_mib} MiB, {len(ours)} alternating rounds")
    for name, rounds in (("publish", ours), ("vLLM's reload_weights", theirs)):
        times = sorted(one.seconds for one in rounds)
        print(
            f"{name:22} {statistics.median(times):6.2f} s in the median ({times[0]:.2f} to {times[-1]:.2f}), "
            f"{max(one.mib for one in rounds):6.0f} MiB at most"
        )
    canary_s = statistics.median(one.canary_s for one in ours)
    print(f"the canary's part of our time: {canary_s:.2f} s in the median")
    print(f"time over vLLM's without the canary: {(seconds - canary_s) / their_seconds:.2f}")
    ratio, buckets = seconds / their_seconds, (mib - their_mib) / bucket_mib
    print(f"time over vLLM's: {ratio:.2f} (at most {SLOWEST})")
    print(f"memory over vLLM's, in buckets: {buckets:.1f} (at most {MOST_BUCKETS})")
    return int(ratio > SLOWEST or buckets > MOST_BUCKETS)


if __name__ == "__main__":
    sys.exit(main())

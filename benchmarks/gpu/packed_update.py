"""Rows `update` and `packing`: GRPO updates of a model of 1.5 B parameters in bf16, and packed against padded rows.

The actor is the one of a run (`rlpack.workers.actor`), with FSDP2 over one rank. Its model has the shape of
Qwen2.5-1.5B and random weights; all tokens but the prompts are trained on.
"""

import functools
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.gpu.figures import Figure, Setup, one_rank, synchronize
from benchmarks.gpu.time_shares import time_shares
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Actor, Config, Data, Model, Placement, Pool, Rollout
from rlpack.data.tokenization import character_tokenizer
from rlpack.distributed.context import RankContext
from rlpack.models.device_peak import device_peak
from rlpack.models.flops import model_flops, sequence_cost
from rlpack.models.loading import build_meta_model
from rlpack.packing import Batching, make_plan
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import PolicyGradientLoss

MFU, PACKING = 0.5, 2.0
PROMPT = 16
# First to last choice of activations to recompute: the first one that the memory allows.
CHECKPOINTING = ("none", "selective", "full")
COMPILED_CHECKPOINTING = ("none", "full")


@dataclass(frozen=True)
class Size:
    """The sizes of a row.

    Attributes:
        shape: keys of the model's config.
        words: size of the vocabulary.
        tokens: token slots of a microbatch.
        longest: tokens of the longest row.
        median: tokens of the median row.
        rows: of an optimizer step.
        precision: compute dtype.
    """

    shape: dict[str, Any]
    words: int
    tokens: int
    longest: int
    median: int
    rows: int
    precision: str = "bf16"

    @property
    def padded_rows(self) -> int:
        """Return the rows of a padded microbatch with as many slots as a packed one."""
        return self.tokens // self.longest


LARGE = Size(
    {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
    },
    words=151_936,
    tokens=16_384,
    longest=2048,
    median=256,
    rows=192,
)
TINY = Size(
    {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    },
    words=256,
    tokens=512,
    longest=128,
    median=32,
    rows=16,
    precision="fp32",
)


def measure_update(setup: Setup) -> Iterator[Figure]:
    """Yield the MFU of packed updates."""
    size = TINY if setup.tiny else LARGE
    peak = device_peak(setup.device, "bf16" if size.precision == "bf16" else "fp32")
    with one_rank(setup.device):
        for compiled in (False,) if setup.tiny else (False, True):  # compiling takes a CPU longer than the row may take
            speed = first_that_fits(size, setup, Batching(max_tokens=size.tokens), compiled=compiled, profiled=True)
            mfu = speed.flops / speed.seconds / peak
            what = (
                f"MFU{' of compiled layers' if compiled else ''}, {size.tokens:,} tokens a microbatch, activations "
                f"recomputed: {speed.checkpointing}"
            )
            shown = f"{mfu:.1%} of {peak / 1e12:,.3g} TFLOP/s, {speed.tokens / speed.seconds:,.0f} tokens/s"
            kept = setup.judged(mfu >= MFU)
            yield Figure(what, f"{shown}, peak {speed.peak_gib:.1f} GiB", f"at least {MFU:.0%}", kept)
            if speed.shares:
                shares = ", ".join(f"{kind} {share:.0%}" for kind, share in speed.shares.items())
                yield Figure("time of a step by kind of kernel", shares)


def measure_packing(setup: Setup) -> Iterator[Figure]:
    """Yield the real tokens per second of padded microbatches, and how many times as many packed ones train."""
    size = TINY if setup.tiny else LARGE
    modes = {
        "packed": Batching(max_tokens=size.tokens),
        "fixed": Batching(mode="fixed", max_tokens=None, micro_batch_size=size.padded_rows),
        "dynamic": Batching(mode="dynamic", max_tokens=size.tokens),
    }
    with one_rank(setup.device):
        speeds = {mode: first_that_fits(size, setup, batching) for mode, batching in modes.items()}
    for mode, speed in speeds.items():
        what = f"{mode}: {speed.microbatches} microbatches, activations recomputed: {speed.checkpointing}"
        yield Figure(what, f"{speed.tokens / speed.seconds:,.0f} real tokens/s")
    ratio = speeds["fixed"].seconds / speeds["packed"].seconds
    what = "tokens per second, packed over padded in arrival order, lognormal lengths"
    yield Figure(what, f"{ratio:.2f}", f"at least {PACKING:g}", setup.judged(ratio >= PACKING))
    yield Figure("packed over padded in order of length", f"{speeds['dynamic'].seconds / speeds['packed'].seconds:.2f}")


@dataclass(frozen=True)
class Speed:
    """What the updates of one setting took."""

    seconds: float
    tokens: int
    flops: float
    microbatches: int
    checkpointing: str
    peak_gib: float
    shares: dict[str, float]


def lognormal_lengths(size: Size, seed: int = 0) -> np.ndarray:
    """Return lognormal lengths with sigma 1; one row has the longest.

    >>> lengths = lognormal_lengths(TINY)
    >>> lengths.size, int(lengths.max())
    (16, 128)
    """
    drawn = np.random.default_rng(seed).lognormal(np.log(size.median), 1.0, size.rows)
    lengths = np.clip(drawn, PROMPT + 1, size.longest).astype(np.int64)
    lengths[lengths.argmax()] = size.longest
    return lengths


def first_that_fits(
    size: Size, setup: Setup, batching: Batching, *, compiled: bool = False, profiled: bool = False
) -> Speed:
    """Return the speed with the least recomputation that the memory allows."""
    for checkpointing in COMPILED_CHECKPOINTING if compiled else CHECKPOINTING:
        # Actors of earlier settings are gone only now: FSDP's units refer to each other.
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return speed_of(size, setup, batching, checkpointing, compiled=compiled, profiled=profiled)
        except torch.OutOfMemoryError:
            if checkpointing == "full":
                raise
    raise AssertionError("the loop returns or raises")


def config_of(size: Size, setup: Setup, batching: Batching, checkpointing: str, *, compiled: bool) -> Config:
    """Return the configuration of a run with one rank."""
    actor: dict[str, Any] = {"precision": size.precision, "gradient_checkpointing": checkpointing, "compile": compiled}
    return Config(
        model=Model(config={"model_type": "qwen2", "tie_word_embeddings": True, **size.shape}),
        data=Data(max_prompt_tokens=PROMPT),
        rollout=Rollout(max_new_tokens=size.longest - PROMPT),
        batching=batching,
        actor=Actor(isolation_check=False, **actor),  # the row `checks` does this
        placement=Placement(pools={"main": Pool(gpus_per_rank=1.0 if setup.device == "cuda" else 0.0)}),
    )


@functools.cache
def tokenizer_of(words: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer of so many words, three of them special."""
    first = 0x10000  # no surrogates follow
    return character_tokenizer("".join(map(chr, range(first, first + words - 3))))


def speed_of(
    size: Size, setup: Setup, batching: Batching, checkpointing: str, *, compiled: bool, profiled: bool
) -> Speed:
    """Return the speed of optimizer steps after two that warm up; with `profiled`, also what one more consists of."""
    config = config_of(size, setup, batching, checkpointing, compiled=compiled)
    lengths = lognormal_lengths(size)
    tokenizer = tokenizer_of(size.words)
    meta = build_meta_model(config.model, vocab_size=len(tokenizer), pad_token_id=0)
    actor = ActorWorker.from_settings(RankContext(device=setup.device), config, tokenizer)
    plan = make_plan(lengths, batching, dp_size=1, cost=sequence_cost(meta))
    shard = batch_of(lengths, len(tokenizer)).shard(plan)[0]
    loss = PolicyGradientLoss(config.algorithm, temperature=config.rollout.temperature)
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(2 + (1 if setup.tiny else 3)):
        synchronize(setup.device)
        start = time.perf_counter()
        (metrics,) = actor.train_step(shard, loss, 1e-6)
        synchronize(setup.device)
        times.append(time.perf_counter() - start)
        assert metrics["actor/skipped_steps"] == 0, "a gradient was zero or not finite"
    peak = torch.cuda.max_memory_allocated() if setup.device == "cuda" else 0
    profiled = profiled and setup.device == "cuda"
    shares = time_shares(lambda: actor.train_step(shard, loss, 1e-6)) if profiled else {}
    scored = int(lengths.sum()) - PROMPT * lengths.size
    return Speed(
        float(np.median(times[2:])),
        int(lengths.sum()),
        model_flops(meta).update(lengths, scored),
        int(plan.counts.shape[1]),
        checkpointing,
        peak / 2**30,
        shares,
    )


def batch_of(lengths: np.ndarray, words: int) -> BatchedDataDict:
    """Return rows of random tokens with the columns that the loss reads."""
    generator = torch.Generator().manual_seed(0)
    sizes, total = torch.from_numpy(lengths), int(lengths.sum())
    tokens = Ragged(torch.randint(3, words, (total,), generator=generator), sizes)
    places = torch.cat([torch.arange(length) for length in lengths.tolist()])
    mask = tokens.with_values(places >= PROMPT)
    trained = total - PROMPT * lengths.size
    rows = torch.ones(lengths.size)
    return BatchedDataDict(
        {
            "input_ids": tokens,
            "response_mask": mask,
            # Close to those of a new model, so that no ratio is clipped.
            "logprobs": tokens.with_values(torch.where(mask.values, -np.log(words), 0.0).float()),
            "advantages": torch.randn(lengths.size, generator=generator),
            "loss_weight": rows / trained,
            "token_weight": rows / trained,
        }
    )

"""Time the `hf` engine against that of another commit in one process; print the ratio of their tokens per second.

    git worktree add --detach .baseline COMMIT
    python -m benchmarks.generation --baseline .baseline [--models tiny 17M] [--threads 1 2] [--rows 64 256]

Both engines generate from the same model, prompts and seeds, in turns, so that a slow moment of the machine meets both.
Wall-clock time counts; CPU time of the process is printed, too, since other programs change it less. Lengths are
`skewed` (one token in 30 ends a response; mean about 25, longest 128) or `fixed` (128). Exits with 1 if a ratio is
below --bar.
"""

import argparse
import copy
import importlib
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rlpack.config.schema import Model
from rlpack.models.cpu_products import FasterLinear
from rlpack.models.loading import build_causal_lm

LONGEST, TOKENS_PER_STOP, GROUP = 128, 30, 8
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 32


class Size(NamedTuple):
    """A model of the Qwen2 family."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int


MODELS = {
    "tiny": Size(128, 2, 4, 2, 384, 64),  # configs/model/tiny.yaml: 0.4 M parameters
    "17M": Size(384, 8, 6, 2, 1152, 8192),
    "100M": Size(768, 12, 12, 4, 2048, 32000),
}
LENGTHS = ("skewed", "fixed")


class Seconds(NamedTuple):
    """Time of one call."""

    wall: float
    cpu: float


def model_section(size: Size) -> Model:
    """Return the configuration of a model."""
    config = {
        "model_type": "qwen2",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return Model(config=config)


def build(size: Size) -> PreTrainedModel:
    """Return a model with random weights."""
    return build_causal_lm(model_section(size), vocab_size=size.vocabulary, attention_name="sdpa")


def with_pytorchs_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy without the faster products of this checkout."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, FasterLinear):
            module.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]  # has the same attributes
    return copied


def baseline_engine(folder: Path) -> ModuleType:
    """Import the `hf` engine of another checkout, next to the one that is imported already.

    Raises:
        FileNotFoundError: the folder is no checkout of rlpack.
    """
    if not (folder / "rlpack" / "rollout" / "hf.py").is_file():
        raise FileNotFoundError(f"--baseline {folder} has no rlpack/rollout/hf.py; give a checkout of rlpack")

    def own(name: str) -> bool:
        return name.partition(".")[0] == "rlpack"

    mine = {name: sys.modules.pop(name) for name in list(sys.modules) if own(name)}
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("rlpack.rollout.hf")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if own(name)]:
            del sys.modules[name]
        sys.modules.update(mine)


def prompts(rows: int, vocabulary: int) -> list[list[int]]:
    """Return groups of equal random prompts."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(rows // GROUP):
        length = rng.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1)
        drawn += [rng.integers(0, vocabulary, length).tolist()] * GROUP
    return drawn


def generating(module: ModuleType, model: PreTrainedModel, rows: int, lengths: str) -> Callable[[], np.ndarray]:
    """Return a function that generates with a module's engine and returns the lengths of responses."""
    vocabulary = model.config.get_text_config().vocab_size
    stops = tuple(range(round(vocabulary / TOKENS_PER_STOP))) if lengths == "skewed" else ()
    params = module.SamplingParams(max_new_tokens=LONGEST, stop_token_ids=stops)
    column = module.Ragged.from_rows(prompts(rows, vocabulary), torch.int64)
    seeds = np.random.default_rng(1).integers(0, 2**64, rows, dtype=np.uint64)
    engine = module.HFEngine(model, max_num_seqs=256)
    return lambda: engine.generate(column, params, seeds).token_ids.lengths.numpy()


def timed(generate: Callable[[], np.ndarray]) -> Seconds:
    """Return the time of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    generate()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


class Measured(NamedTuple):
    """Medians of one setting.

    Attributes:
        mean: tokens of a response.
        baseline: its tokens per second.
        own: tokens per second of this checkout.
        cpu_ratio: own tokens per second of CPU time, relative to the baseline's.
    """

    mean: float
    baseline: float
    own: float
    cpu_ratio: float


def measure(modules: tuple[ModuleType, ...], model: PreTrainedModel, rows: int, lengths: str, n: int) -> Measured:
    """Time the baseline's engine and this one's in turns, `n` times each."""
    models = (with_pytorchs_layers(model), model)
    calls = [generating(*engine, rows, lengths) for engine in zip(modules, models, strict=True)]
    counts = [call() for call in calls]  # the first call warms up
    seconds: list[list[Seconds]] = [[], []]
    for _ in range(n):
        for times, call in zip(seconds, calls, strict=True):
            times.append(timed(call))
    tokens = [int(count.sum()) for count in counts]
    wall = [total / float(np.median([s.wall for s in times])) for total, times in zip(tokens, seconds, strict=True)]
    cpu = [total / float(np.median([s.cpu for s in times])) for total, times in zip(tokens, seconds, strict=True)]
    return Measured(float(counts[1].mean()), wall[0], wall[1], cpu[1] / cpu[0])


def main() -> int:
    """Measure, print, and compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, required=True, help="a checkout of the commit to compare with")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bar", type=float, default=1.3)
    options = parser.parse_args()
    modules = (baseline_engine(options.baseline), importlib.import_module("rlpack.rollout.hf"))
    print(f"tokens/s, medians of {options.repeats} alternations; the ratio of wall-clock time, and of CPU time\n")
    print("model threads  rows lengths   mean  baseline       own  ratio    CPU")
    missed = 0
    models = {name: build(MODELS[name]) for name in options.models}
    for name, threads, rows, lengths in product(models, options.threads, options.rows, options.lengths):
        torch.set_num_threads(threads)
        found = measure(modules, models[name], rows, lengths, options.repeats)
        ratio = found.own / found.baseline
        missed += ratio < options.bar
        speeds = f"{found.mean:6.1f}{found.baseline:10,.0f}{found.own:10,.0f}{ratio:7.2f}{found.cpu_ratio:7.2f}"
        print(f"{name:5}{threads:8}{rows:6} {lengths:8}{speeds}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Time generation by vLLM against the `hf` engine: the same model, prompts and sampling; print tokens per second.

    python -m benchmarks.vllm_generation [--models 17M 100M] [--rows 64] [--repeats 5]

Needs vLLM: `make vllm`, then run it with .venv-vllm/bin/python. Each engine computes with one thread, and they take
turns. vLLM computes in a separate process; its front end, in this one, can use the machine's second core. Lengths are
`skewed`: one token in 30 ends a response; mean about 25, longest 128. Engines sample the same distribution from
different random numbers, so tokens are counted for each. Exits with 1 if a ratio is below its bar.

The second line of a model has the tokens per second of its linear layers alone, in fp32 on one thread
(`benchmarks/linear_layers.py`). An engine with PyTorch's libraries can't be faster.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from benchmarks.generation import LONGEST, LONGEST_PROMPT, MODELS, TOKENS_PER_STOP, model_section, prompts
from benchmarks.linear_layers import LinearLayers
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Rollout
from rlpack.data.tokenization import character_tokenizer
from rlpack.malloc_settings import keep_freed_memory
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine

BARS = {"tiny": 0.0, "17M": 1.7, "100M": 2.5}
FIRST_CHARACTER = 0x4E00


AnyEngine = HFEngine | VLLMEngine
E = TypeVar("E", HFEngine, VLLMEngine)


def start(kind: type[E], name: str) -> E:
    """Return an engine with the model; both have the same random weights."""
    settings = Rollout(engine="vllm" if kind is VLLMEngine else "hf", max_new_tokens=LONGEST)
    characters = "".join(map(chr, range(FIRST_CHARACTER, FIRST_CHARACTER + MODELS[name].vocabulary - 4)))
    return kind.from_settings(
        model_section(MODELS[name]),
        settings,
        character_tokenizer(characters),
        device=torch.device("cpu"),
        seed=0,
        max_length=LONGEST_PROMPT + LONGEST,
    )


def generating(engine: AnyEngine, rows: int, vocabulary: int) -> Callable[[int], np.ndarray]:
    """Return a function that generates from a seed and returns the tokens of each response."""
    column = Ragged.from_rows([torch.tensor(prompt) for prompt in prompts(rows, vocabulary)], torch.int64)
    stops = tuple(range(round(vocabulary / TOKENS_PER_STOP)))
    params = SamplingParams(max_new_tokens=LONGEST, stop_token_ids=stops)

    def generate(seed: int) -> np.ndarray:
        seeds = np.random.default_rng(seed).integers(0, 2**63, rows).astype(np.uint64)
        return engine.generate(column, params, seeds).token_ids.lengths.numpy()

    return generate


def rates(calls: list[Callable[[int], np.ndarray]], layers: LinearLayers, repeats: int) -> list[float]:
    """Return each engine's tokens per second over alternating calls, the median.

    The last number is that of the linear layers alone, with the lengths of the first engine's responses.
    """
    found: list[list[float]] = [[] for _ in range(len(calls) + 1)]
    for repeat in range(-1, repeats):  # the first call warms up
        lengths: list[np.ndarray] = []
        for speeds, call in zip(found, calls, strict=False):
            begin = time.perf_counter()
            lengths.append(call(repeat + 1))
            speeds.append(lengths[-1].sum() / (time.perf_counter() - begin))
        found[-1].append(lengths[0].sum() / layers.seconds_of(lengths[0]))
    return [float(np.median(speeds[1:])) for speeds in found]


def main() -> int:
    """Measure, print, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["17M", "100M"], choices=BARS)
    parser.add_argument("--rows", nargs="+", type=int, default=[64])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as ranks do
    missed = 0
    for name in options.models:
        hf, vllm, layers = start(HFEngine, name), start(VLLMEngine, name), LinearLayers(MODELS[name])
        for rows in options.rows:
            vocabulary = MODELS[name].vocabulary
            calls = [generating(hf, rows, vocabulary), generating(vllm, rows, vocabulary)]
            by_hf, by_vllm, bound = rates(calls, layers, options.repeats)
            ratio = by_vllm / by_hf
            missed += ratio < BARS[name]
            print(
                f"{name:5} {rows:4} rows: hf {by_hf:8,.0f} tokens/s, vLLM {by_vllm:8,.0f}, {ratio:.2f} times as many "
                f"(at least {BARS[name]})\n"
                f"{'':16} linear layers alone {bound:8,.0f}, {bound / by_hf:.2f} times as many as hf",
                flush=True,
            )
        vllm.close()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

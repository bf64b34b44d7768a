"""Time steps with and without `trainer.lead`, on two cores, with a tail of long responses.

    python -m benchmarks.ahead [--repeats 3] [--steps 24] [--mini-batches 4] [--prompts 10] [--longest 450] [--bar 1.5]

One prompt in ten has responses as long as the limit, five times the mean of the others, so most of generation waits for
a few responses. The dataset has the prompts of one step, so that every step has the same share of long responses. Three
ways take turns: two ranks that generate and train in turns, one rank for each without a lead, and one rank for each
with a lead of one step. A run's figure is the mean of its steps but the first two and the last. `--mini-batches` is the
number of optimizer steps of a batch; with 1, training skips the pass over old log-probs. `--prompts` is their number in
a step: the fewer, the larger the part of generation, whose longest responses take the same time. `--longest` is the
limit of a response in tokens: with a larger one, a step takes longer, and what the driver does between the parts of a
step is a smaller share of it. Before each repeat, a control measures the machine: how many times as much two
processes compute as one, in the same time. Without work between the parts of a step, and with two cores that don't slow
each other down, this and the gain of a lead would be 2. Exits with 1 if a lead takes fewer than `--bar` times the steps
of the same ranks without one.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.trl_grpo import ALPHABET, ROOT

DEADLINE_S, GROUP = 600.0, 2
_PRODUCTS = 6000
# Tokens of a long response over the mean of a short one, and the share of long ones.
TAIL, SHARE = 5, 0.1
# The letters of each phase of a short response, and those of the only phase of a long one.
SHORT_PHASES, LONG_PHASE = ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st"), "uv"
WAYS = {
    "two ranks in turns": ("placement=cpu",),
    "a rank for each, lead 0": ("placement=two_pools",),
    "a rank for each, lead 1": ("placement=two_pools", "trainer.lead=1"),
}


def write_inputs(folder: Path, longest: int, num_prompts: int) -> None:
    """Save a model whose responses are short or as long as the limit of `longest` tokens, and the prompts of a step.

    A prompt's last letter decides which. A short response passes through all phases, each of a geometrically
    distributed number of letters, and ends: its length has a standard deviation of 32 % of the mean. A long response
    doesn't leave its phase. Only the embedding sets the first entries of the hidden state, a constant and one for each
    phase. The output layer reads them, so that the next letter depends on the last one's phase only.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlpack.data.tokenization import character_tokenizer, eos_id, pad_id

    tokenizer = character_tokenizer(ALPHABET)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=longest + 64,
        tie_word_embeddings=False,
        pad_token_id=pad_id(tokenizer),
        eos_token_id=eos_id(tokenizer),
    )
    model: Any = Qwen2ForCausalLM(config)
    phases = (*SHORT_PHASES, LONG_PHASE)
    ids = [tokenizer.convert_tokens_to_ids(list(letters)) for letters in phases]
    # Odds that a letter is the last one of its phase.
    share = len(SHORT_PHASES) * TAIL / longest
    odds = share / (1 - share)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[: len(phases) + 1] = 0
            layer.mlp.down_proj.weight[: len(phases) + 1] = 0
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        # Large against the other entries, so that the norm makes both √(128 / 2) in size whatever else there is.
        embedding[:, : len(phases) + 1] = 0
        embedding[:, 0] = 100.0
        size = (128 / 2) ** 0.5
        head[:, : len(phases) + 1] = 0
        head[:, 0] = -100 / size
        head[config.eos_token_id, 0] = -40 / size
        # Logits after a letter: 0 for letters of its phase, log(odds) for those of the next one, -40 for others.
        for phase, letters in enumerate(ids, start=1):
            embedding[letters, phase] = 100.0
            head[letters, 0] = -40 / size
            head[letters, phase] = 40 / size
        for phase, letters in enumerate(ids[1 : len(SHORT_PHASES)], start=1):
            head[letters, phase] = (40 + math.log(odds)) / size
        head[config.eos_token_id, len(SHORT_PHASES)] = (40 + math.log(len(SHORT_PHASES[-1]) * odds)) / size
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    num_long = max(1, round(num_prompts * SHARE))
    last = (
        rng.choice(list(LONG_PHASE), num_long).tolist()
        + rng.choice(list(SHORT_PHASES[0]), num_prompts - num_long).tolist()
    )
    texts = ["".join(rng.choice(list(ALPHABET), rng.integers(8, 25))) + letter for letter in last]
    records = "".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts)
    (folder / "prompts.jsonl").write_text(records, encoding="utf-8")
    (folder / "held_out.jsonl").write_text("".join(records.splitlines(keepends=True)[-2:]), encoding="utf-8")


def seconds_of_products(num_products: int, barrier: threading.Barrier | None = None) -> float:
    """Return the time of the products of an MLP layer of 256 tokens on one thread, in seconds.

    Args:
        num_products: how many are timed; others are computed first.
        barrier: where this process waits for others, so that all are timed at once.
    """
    import torch

    torch.set_num_threads(1)
    states, weight = torch.randn(256, 128), torch.randn(384, 128)
    for timed in (num_products // 10, num_products):
        if barrier is not None:
            barrier.wait(60.0)
        begin = time.perf_counter()
        for _ in range(timed):
            _ = torch.nn.functional.silu(states @ weight.t()) @ weight
        seconds = time.perf_counter() - begin
    return seconds


def speedup_of_two_processes() -> float:
    """Return how many times as much two processes compute as one, in the same time."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(2) as pool:
        barrier = manager.Barrier(2)
        seconds_of_one = pool.apply(seconds_of_products, (_PRODUCTS,))
        seconds_of_two = max(pool.starmap(seconds_of_products, [(_PRODUCTS, barrier)] * 2, chunksize=1))
    return 2 * seconds_of_one / seconds_of_two


class Work(NamedTuple):
    """What a run does: its steps, the optimizer steps and prompts of each, and the longest response in tokens."""

    steps: int
    mini_batches: int
    prompts: int
    longest: int


class Step(NamedTuple):
    """Means of a run's steps, in seconds, and of the tokens of a response."""

    whole: float
    generation: float
    drain: float
    length: float


def run(folder: Path, overrides: tuple[str, ...], work: Work) -> Step:
    """Run `rlpack train` and return its means."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    command = [
        *(sys.executable, "-m", "rlpack", "train", f"run_dir={run_dir}", *overrides),
        *("model=pretrained", f"model.path={folder}/model", "data=jsonl", f"data.source={folder}/prompts.jsonl"),
        *(f"data.validation_source={folder}/held_out.jsonl", f"trainer.steps={work.steps}"),
        *("reward.function=benchmarks.trl_grpo:vowels", f"rollout.max_new_tokens={work.longest}"),
        *("evaluation.every=1000", "evaluation.samples=1", "checkpoint.every=1000"),
        f"trainer.mini_batch_size={work.prompts * GROUP // work.mini_batches}",
        *(
            "actor.optimizer.learning_rate=1e-12",
            f"trainer.prompts_per_step={work.prompts}",
            f"trainer.group_size={GROUP}",
        ),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    taken = [record for record in records if record["phase"] == "train"][2:-1]
    whole, generation, drain = (
        statistics.fmean(one.get(f"time/{name}_s", 0.0) for one in taken) for name in ("step", "generate", "drain")
    )
    return Step(whole, generation, drain, statistics.fmean(one["rollout/response_tokens_mean"] for one in taken))


def main() -> int:
    """Alternate the three ways, and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--mini-batches", type=int, default=4, choices=(1, 2, 4))
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--longest", type=int, default=450)
    parser.add_argument("--bar", type=float, default=1.5)
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps is {options.steps}; the first two and the last don't count, so it has to be at least 4")
    if options.longest <= len(SHORT_PHASES) * TAIL:
        parser.error(f"--longest is {options.longest}; it has to be above {len(SHORT_PHASES) * TAIL}")
    work = Work(options.steps, options.mini_batches, options.prompts, options.longest)
    found: dict[str, list[Step]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), options.longest, options.prompts)
        speedups: list[float] = []
        for _ in range(options.repeats):
            speedups.append(speedup_of_two_processes())
            print(f"two processes compute {speedups[-1]:.2f} times as much as one")
            for way, overrides in WAYS.items():
                found[way].append(run(Path(name), overrides, work))
                print(f"{way}: {found[way][-1].whole:.2f} s", flush=True)
    seconds = {way: statistics.median(step.whole for step in steps) for way, steps in found.items()}
    for way, steps in found.items():
        generation, drain = (
            statistics.median(getattr(step, part) for step in steps) for part in ("generation", "drain")
        )
        print(f"{way:26}{seconds[way]:7.2f} s a step, {generation:.2f} s generation, {drain:.2f} s waiting for it")
    length = statistics.fmean(step.length for steps in found.values() for step in steps)
    print(f"two processes compute {statistics.median(speedups):.2f} times as much as one")
    turns, apart, lead = seconds.values()
    print(f"{length:.1f} tokens per response on average, at most {options.longest}")
    print(f"lead 1 against lead 0 on the same ranks {apart / lead:.2f}, against two ranks in turns {turns / lead:.2f}")
    return int(apart / lead < options.bar)


if __name__ == "__main__":
    sys.exit(main())

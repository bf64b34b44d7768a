"""Time supervised steps against TRL's SFTTrainer with its own packing: same model, data and cores.

    make peers     # installs TRL into .peers
    python -m benchmarks.trl_sft --peers .peers [--repeats 3] [--steps 8]

The data are 2,048 completions with Zipf lengths, 45 to 1,000 tokens, after prompts of 8 characters; the model has 11 M
parameters. rlpack runs as `rlpack train recipe=sft` with two ranks, 64 sequences an optimizer step. TRL packs by best
fit into rows of 1,024 tokens (`packing=True`), one row a microbatch, in optimizer steps of 8 rows, so that both train
about as many tokens a step; it runs as one process with two threads and as two with one each, and its faster way
counts. The three take turns. Real tokens per second of the steps but the first two and the last; of the same loss, that
of completions. Exits with 1 if the ratio is below its bar.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training_step import zipf_lengths
from benchmarks.trl_grpo import ALPHABET, execute

BAR, SEQUENCES, PROMPT, ROW, ROWS = 1.2, 64, 8, 1024, 8


def write_inputs(folder: Path) -> None:
    """Save the model with its tokenizer, and the data."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlpack.data.tokenization import character_tokenizer, eos_id, pad_id

    tokenizer = character_tokenizer(ALPHABET)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=1152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=pad_id(tokenizer),
        eos_token_id=eos_id(tokenizer),
    )
    model: Any = Qwen2ForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    lengths = np.concatenate([zipf_lengths(seed) for seed in range(52)])[:2048].clip(max=1000)
    lines = [
        json.dumps({"prompt": _text(rng, PROMPT), "completion": _text(rng, int(length)), "answer": ""}) + "\n"
        for length in lengths
    ]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "held_out.jsonl").write_text("".join(lines[:2]), encoding="utf-8")


def _text(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(list(ALPHABET), length))


def run_rlpack(folder: Path, steps: int) -> float:
    """Run `rlpack train` with two ranks of one core each; return tokens per second."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    execute(
        *(sys.executable, "-m", "rlpack", "train", "recipe=sft", "model=pretrained", f"model.path={folder}/model"),
        *("data=jsonl", f"data.source={folder}/data.jsonl", f"data.validation_source={folder}/held_out.jsonl"),
        *("data.completion_column=completion", f"run_dir={run_dir}", f"trainer.steps={steps}"),
        *(f"trainer.prompts_per_step={SEQUENCES}", "actor.optimizer.learning_rate=1e-5"),
        *("evaluation.every=1000", "evaluation.samples=1", "checkpoint.every=1000"),
    )
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    taken = [record for record in records if record["phase"] == "train" and "time/step_s" in record][2:-1]
    tokens = sum(record["packing/real_tokens"] for record in taken)
    return tokens / sum(record["time/step_s"] for record in taken)


def run_trl(folder: Path, steps: int, peers: Path, processes: int) -> float:
    """Run TRL's trainer in one process with two threads, or in two with one each; return tokens per second."""
    out = folder / f"trl-{time.monotonic_ns()}.json"
    distributed = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "--module")
    arguments = ("--peers", str(peers), "--train", str(folder), "--steps", str(steps), "--out", str(out))
    launcher = ("-m",) if processes == 1 else distributed
    execute(sys.executable, *launcher, "benchmarks.trl_sft", *arguments, OMP_NUM_THREADS=str(2 // processes))
    return float(out.read_text(encoding="utf-8"))


def train_with_trl(folder: Path, steps: int, peers: Path, out: Path) -> None:
    """Train with TRL in this process, and write tokens per second to `out` on rank 0."""
    sys.path.append(str(peers))
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]  # installed by hand

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS // processes,
        max_length=ROW,
        packing=True,
        max_steps=steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    ends: list[float] = []
    seen: list[float] = []

    class Clock(TrainerCallback):
        """Notes when optimizer steps end, and how many tokens TRL has counted by then."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, *arguments: Any, logs: dict[str, float], **_: Any) -> None:
            if "num_tokens" in logs:
                seen.append(float(logs["num_tokens"]))

    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=settings,
        train_dataset=Dataset.from_json(str(folder / "data.jsonl")).remove_columns("answer"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        counted = [later - earlier for earlier, later in pairwise(seen)]
        times = [later - earlier for earlier, later in pairwise(ends)]
        out.write_text(str(sum(counted[1:-1]) / sum(times[1:-1])), encoding="utf-8")


def main() -> int:
    """Compare the two, or train with TRL where the comparison calls this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps is {options.steps}; the first two and the last don't count, so it has to be at least 4")
    peers = options.peers.resolve()
    if options.train is not None:
        train_with_trl(options.train, options.steps, peers, options.out)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        sides: dict[str, Callable[[], float]] = {
            "rlpack, two ranks": lambda: run_rlpack(folder, options.steps),
            "TRL, one process": lambda: run_trl(folder, options.steps, peers, 1),
            "TRL, two processes": lambda: run_trl(folder, options.steps, peers, 2),
        }
        found: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side, run in sides.items():
                found[side].append(run())
            print(", ".join(f"{side} {speeds[-1]:,.0f} tokens/s" for side, speeds in found.items()), flush=True)
    own, *theirs = (statistics.median(speeds) for speeds in found.values())
    ratio = own / max(theirs)
    print(f"medians: rlpack {own:,.0f} tokens/s, TRL's faster way {max(theirs):,.0f}: {ratio:.2f} (at least {BAR})")
    return int(ratio < BAR)


if __name__ == "__main__":
    sys.exit(main())

"""Time GRPO steps against TRL's GRPOTrainer: same model, tokenizer, prompts, batch sizes and lengths, on two cores.

    make peers     # installs TRL into .peers
    python -m benchmarks.trl_grpo --peers .peers [--settings skewed fixed] [--repeats 5] [--steps 6]
    make vllm      # then, with .venv-vllm/bin/python: --settings vllm

A step is 32 prompts × 8 responses and four optimizer steps of 64 sequences, with a KL term. rlpack runs as
`rlpack train` with two ranks that hold the whole model each (`actor.parallel.dp_replicate=2`), as TRL's do, and
`batching.share_prompts=true` (`--whole-rows` leaves it out), and with the overrides that follow `--overrides`. It runs
a second time with `algorithm.correction.bypass=true`: the sampler's log-probs then serve as the old ones, from which
they differ by rounding, while TRL gets none from transformers and computes them. TRL runs as one process with two
threads and as two processes with one each, and its faster way counts. All take turns. A run's figure is the median of
its steps but the first and the last.

Settings are `fixed`, exactly 64 tokens, by a model that never samples the end of sequence; `skewed`, mean about 25 and
at most 128, by a random model over 26 tokens; and `vllm`, the same lengths by a model of 14 M parameters, where rlpack
generates with vLLM and TRL with transformers. The learning rate of 1e-12 keeps lengths as they are. Exits with 1 if a
ratio is below its bar; the runs with `bypass` don't count for that.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PROMPTS, GROUP, MINI_BATCHES, ROWS = 32, 8, 4, 64
LEARNING_RATE, KL = 1e-12, 0.03
ALPHABET = "abcdefghijklmnopqrstuvw"


class Setting(NamedTuple):
    """A model, the lengths of its responses, and the bar.

    Attributes:
        longest: most tokens of a response.
        bar: how many times as long TRL's step has to take.
        shape: hidden size, layers, heads, key-value heads and intermediate size.
        overrides: of `rlpack train`.
    """

    longest: int
    bar: float
    shape: tuple[int, int, int, int, int] = (128, 2, 4, 2, 384)
    overrides: tuple[str, ...] = ()


SETTINGS = {
    "fixed": Setting(64, 1.5),
    "skewed": Setting(128, 4.5),
    "vllm": Setting(128, 3.0, (384, 8, 6, 2, 1152), ("rollout=vllm",)),
}
BYPASS = ("algorithm.correction.bypass=true",)
ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 1800.0


class Run(NamedTuple):
    """What one run measured: seconds of a step, and tokens of a response."""

    step_s: float
    length: float


def vowels(completion: str) -> float:
    """Return the share of vowels: the reward on both sides."""
    return sum(character in "aeiou" for character in completion) / max(1, len(completion))


def write_inputs(folder: Path, setting: str) -> None:
    """Save the model with its tokenizer, and the prompts."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlpack.data.tokenization import character_tokenizer, eos_id, pad_id

    tokenizer = character_tokenizer(ALPHABET)
    torch.manual_seed(0)
    hidden, layers, heads, key_value_heads, intermediate = SETTINGS[setting].shape
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=intermediate,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=pad_id(tokenizer),
        eos_token_id=eos_id(tokenizer),
    )
    model: Any = Qwen2ForCausalLM(config)
    if setting == "fixed":
        # Entry 0 of the hidden state is a constant that only the end of sequence reads.
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 1.0
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight[0] = 0
                layer.mlp.down_proj.weight[0] = 0
            model.lm_head.weight[:, 0] = 0
            model.lm_head.weight[config.eos_token_id, 0] = -100
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list(ALPHABET), rng.integers(8, 25))) for _ in range(1024)]
    records = "".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts)
    (folder / "prompts.jsonl").write_text(records, encoding="utf-8")
    (folder / "held_out.jsonl").write_text("".join(records.splitlines(keepends=True)[:2]), encoding="utf-8")


def run_rlpack(folder: Path, setting: str, steps: int, *, share: bool, further: Sequence[str] = ()) -> Run:
    """Run `rlpack train` with two ranks of one core each; `share`, compute each prompt of a microbatch once."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    overrides = (
        *("model=pretrained", f"model.path={folder}/model", "data=jsonl", f"data.source={folder}/prompts.jsonl"),
        *(f"data.validation_source={folder}/held_out.jsonl", f"run_dir={run_dir}", f"trainer.steps={steps}"),
        *(f"trainer.prompts_per_step={PROMPTS}", f"trainer.group_size={GROUP}", f"trainer.mini_batch_size={ROWS}"),
        *("reward.function=benchmarks.trl_grpo:vowels", f"algorithm.kl_coef={KL}"),
        *(f"actor.optimizer.learning_rate={LEARNING_RATE}", f"rollout.max_new_tokens={SETTINGS[setting].longest}"),
        *("evaluation.every=1000", "evaluation.samples=1", "checkpoint.every=1000"),
        *("actor.parallel.dp_replicate=2", f"batching.share_prompts={str(share).lower()}"),
        *SETTINGS[setting].overrides,
        *further,
    )
    execute(sys.executable, "-m", "rlpack", "train", *overrides)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    taken = [record for record in records if record["phase"] == "train" and "time/step_s" in record]
    length = statistics.fmean(record["rollout/response_tokens_mean"] for record in taken)
    return Run(statistics.median(record["time/step_s"] for record in taken[1:-1]), length)


def run_trl(folder: Path, setting: str, steps: int, peers: Path, processes: int) -> Run:
    """Run TRL's trainer in one process with two threads, or in two with one each."""
    out = folder / f"trl-{time.monotonic_ns()}.json"
    distributed = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    launcher = ("-m",) if processes == 1 else (*distributed, "--module")
    arguments = ("--peers", str(peers), "--train", str(folder), "--settings", setting, "--steps", str(steps))
    command = (sys.executable, *launcher, "benchmarks.trl_grpo", *arguments, "--out", str(out))
    execute(*command, OMP_NUM_THREADS=str(2 // processes))
    return Run(*json.loads(out.read_text(encoding="utf-8")))


def train_with_trl(folder: Path, setting: str, steps: int, peers: Path, out: Path) -> None:
    """Train with TRL in this process, and write what `Run` holds to `out` on rank 0."""
    sys.path.append(str(peers))
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # installed by hand

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=ROWS // processes,
        gradient_accumulation_steps=1,
        steps_per_generation=MINI_BATCHES,
        num_generations=GROUP,
        max_completion_length=SETTINGS[setting].longest,
        max_steps=steps * MINI_BATCHES,
        beta=KL,
        loss_type="grpo",
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=LEARNING_RATE,
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

    class Clock(TrainerCallback):
        """Notes when optimizer steps end."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [vowels(completion) for completion in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_json(str(folder / "prompts.jsonl")),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        marks = ends[MINI_BATCHES - 1 :: MINI_BATCHES]  # the end of each step of 256 responses
        between = [later - earlier for earlier, later in pairwise(marks)]
        name = "completions/mean_length"
        logged = [record[name] for record in trainer.state.log_history if name in record]
        out.write_text(json.dumps([statistics.median(between[:-1]), statistics.fmean(logged)]), encoding="utf-8")


def execute(*command: str, **environment: str) -> None:
    """Run a command in the root of the checkout; show its end if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd=ROOT, env=variables
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def compare(
    setting: str, steps: int, repeats: int, peers: Path, *, share: bool, further: Sequence[str]
) -> tuple[float, float]:
    """Print each alternation and the medians; return how many times as long TRL's faster way takes.

    The second ratio is that of rlpack with the sampler's log-probs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, setting)
        sides: dict[str, Callable[[], Run]] = {
            "rlpack": lambda: run_rlpack(folder, setting, steps, share=share, further=further),
            "rlpack, bypass": lambda: run_rlpack(folder, setting, steps, share=share, further=[*BYPASS, *further]),
            "TRL, one process": lambda: run_trl(folder, setting, steps, peers, 1),
            "TRL, two processes": lambda: run_trl(folder, setting, steps, peers, 2),
        }
        runs: dict[str, list[Run]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side, run in sides.items():
                runs[side].append(run())
            last = ", ".join(f"{side} {found[-1].step_s:.2f} s" for side, found in runs.items())
            print(f"{setting}: {last}", flush=True)
    medians = {side: statistics.median(run.step_s for run in found) for side, found in runs.items()}
    for side, found in runs.items():
        length = statistics.fmean(run.length for run in found)
        speed = f"{medians[side]:7.2f} s a step,{60 / medians[side]:6.1f} a minute"
        print(f"{setting:7} {side:20}{speed}, {length:.1f} tokens a response")
    own, bypass, *theirs = medians.values()
    return min(theirs) / own, min(theirs) / bypass


def main() -> int:
    """Compare the two, or train with TRL where the comparison calls this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=["fixed", "skewed"], choices=SETTINGS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--whole-rows", action="store_true", help="let rlpack compute each row's prompt")
    parser.add_argument("--overrides", nargs="*", default=[], help="further overrides of rlpack train")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 3:
        parser.error(f"--steps is {options.steps}; the first and the last don't count, so it has to be at least 3")
    if options.train is not None:
        train_with_trl(options.train, options.settings[0], options.steps, options.peers.resolve(), options.out)
        return 0
    missed = 0
    for setting in options.settings:
        share = not options.whole_rows
        peers, further = options.peers.resolve(), options.overrides
        ratios = compare(setting, options.steps, options.repeats, peers, share=share, further=further)
        missed += ratios[0] < SETTINGS[setting].bar
        print(
            f"{setting}: TRL's faster way / rlpack {ratios[0]:.2f}, with bypass {ratios[1]:.2f} "
            f"(at least {SETTINGS[setting].bar})",
            flush=True,
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

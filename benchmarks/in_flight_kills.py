"""Kill a run that publishes in flight at random moments, resume it each time, and check the ledger of its prompts.

    python -m benchmarks.in_flight_kills FOLDER [--kills 10] [--limit-s 1e9] [--lead 2] [--seed 1]
    python -m benchmarks.in_flight_kills FOLDER --finish

Run it in the environment of `make vllm`. The process group of the driver is killed (SIGKILL) at a random moment of a
random step, or while the resumed run starts. A further call continues the runs in FOLDER. After each call, every
step must have trained on its own prompts, each once, whose tokens are at most `--lead` versions old; if not, the exit
code is 1. After `--limit-s` seconds there are no more kills.

`--finish` lets the run finish. Then it makes a synchronous run (`trainer.lead=0`) of as many steps, and
compares the lengths of all responses that both trained on (two-sample Kolmogorov-Smirnov test). The learning rate is so
small that the policy barely changes, so lengths depend only on its engine.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kills import DEADLINE_S, finish, reap, start
from benchmarks.ledger import Lineage, kolmogorov_smirnov, lineage, problems_of
from rlpack.data.sampler import prompt_positions

PROMPTS, GROUP, TRAIN_SIZE = 8, 4, 4096
SHARED = (
    "recipe.target=benchmarks.ledger",
    "experiment=smoke",
    "rollout=vllm",
    "rollout.kv_cache_gb=0.2",
    "rollout.max_new_tokens=160",
    "rollout.max_num_seqs=64",
    f"data.generator.train_size={TRAIN_SIZE}",
    "data.generator.validation_size=2",
    "data.generator.min_operands=4",
    "data.generator.max_operands=24",
    "data.generator.mean_operands=16",
    "sft_warmup.steps=40",
    "sft_warmup.batch_size=32",
    "sft_warmup.learning_rate=1e-3",
    f"trainer.prompts_per_step={PROMPTS}",
    f"trainer.group_size={GROUP}",
    "reward.function=benchmarks.digit_reward:digits",
    "algorithm.kl_coef=0",
    "actor.optimizer.learning_rate=1e-9",
    "actor.optimizer.schedule=constant",
    "evaluation.every=100000",
    "checkpoint.every=2",
    "checkpoint.asynchronous=true",
    "batching.max_tokens=1024",
    "placement=two_pools",
)
KILLS = "kills.jsonl"


def main() -> int:
    """Kill the run some times more, or finish it; then check its ledger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("--lead", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--finish", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    killed, seed = arguments.folder / "killed", f"seed={arguments.seed}"
    in_flight = (*SHARED, seed, "rollout.publish=in_flight", f"trainer.lead={arguments.lead}")
    if arguments.finish:
        steps = f"trainer.steps={len(lineage(killed).entries) + arguments.lead + 1}"
        finish(start(killed, (*in_flight, steps)))
    else:
        end = time.perf_counter() + arguments.limit_s
        for _ in range(arguments.kills):
            if time.perf_counter() > end:
                break
            print(kill_once(killed, (*in_flight, "trainer.steps=100000"), arguments.seed), flush=True)
    found = lineage(killed)
    problems = problems_of(found, stream(arguments.seed, len(found.entries)), PROMPTS, GROUP, arguments.lead)
    kills = notes(killed)
    problems += [f"left behind: {name}" for note in kills for name in note["left_behind"]]
    print(summary(found, len(kills)), *problems[:10], sep="\n", flush=True)
    if arguments.finish:
        whole = arguments.folder / "synchronous"
        finish(start(whole, (*SHARED, seed, "trainer.lead=0", f"trainer.steps={len(found.entries)}")))
        print(comparison(found, lineage(whole)), flush=True)
    return int(bool(problems))


def kill_once(run_dir: Path, overrides: tuple[str, ...], seed: int) -> str:
    """Start or resume a run, kill it at a random moment, and return a line about it."""
    before, generator = notes(run_dir), random.Random(f"{seed} {len(notes(run_dir))}")
    path = run_dir / "ledger.jsonl"
    lines = num_lines(path)
    run = start(run_dir, overrides)
    # A third of the kills come before the first step of a resumed run, if they start as fast as the first one did.
    steps = generator.choice((0, 0, 1, 2, 3, 4, 5, 6, 7)) if before else 3
    while steps and num_lines(path) < lines + steps:
        assert run.process.poll() is None, f"it ended: {run.output()}"
        assert time.perf_counter() - run.began < DEADLINE_S, f"it took no {steps} steps: {run.output()}"
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 2.0) if steps else generator.uniform(0, 30.0))
    assert run.process.poll() is None, f"it ended before it was killed: {run.output()}"
    os.killpg(run.process.pid, signal.SIGKILL)
    taken = num_lines(path) - lines
    note = {"steps_of_piece": taken, "after_s": time.perf_counter() - run.began, "left_behind": reap(run)}
    with run_dir.with_name(KILLS).open("a", encoding="utf-8") as notebook:
        notebook.write(json.dumps(note) + "\n")
    return f"kill {len(before) + 1}: {note['after_s']:.1f} s after the start, which took {taken} steps"


def num_lines(path: Path) -> int:
    """Return the whole lines of a file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def notes(run_dir: Path) -> list[dict[str, Any]]:
    """Return what is noted about the kills of a run."""
    path = run_dir.with_name(KILLS)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def stream(seed: int, steps: int) -> list[str]:
    """Return the uids of the prompts that the first steps take, in their order."""
    _, rows = prompt_positions(seed, TRAIN_SIZE, 0, PROMPTS * steps)
    return [f"train-{row}" for row in rows.tolist()]


def summary(found: Lineage, kills: int) -> str:
    """Return a line about a ledger."""
    prompts = sum(len(rows) for rows in found.uids) // GROUP
    return (
        f"{kills} kills, {len(found.entries)} steps with {prompts} prompts, {found.repeated} steps taken again; "
        f"lags 0 to {max(found.lags, default=0)}, {found.mixed:.0%} of responses with tokens of several versions"
    )


def comparison(found: Lineage, whole: Lineage) -> str:
    """Return a line about the lengths of responses of two runs."""
    distance, p = kolmogorov_smirnov(found.lengths, whole.lengths)
    return (
        f"lengths of {found.lengths.size} responses: mean {found.lengths.mean():.2f} after kills, "
        f"{whole.lengths.mean():.2f} of a synchronous run; Kolmogorov-Smirnov distance {distance:.4f}, p = {p:.2f}; "
        f"{(found.lengths == whole.lengths).mean():.0%} are the same; same prompts: {found.uids == whole.uids}"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Kill short runs at random moments, resume them, and compare them with uninterrupted ones bit for bit.

    python -m benchmarks.kills [--runs ppo,dapo,remax,sft,lora,eight_bit,grpo] [--kills 2] [--seed 1] [--ranks 1]

Each run is done once as a whole, and once in pieces: the process group of the driver is killed (SIGKILL) at a random
moment after the first checkpoint, and the run is continued with `resume=auto`, `--kills` times. A moment is a random
step, and a random part of a step after its record: it may lie in generation, an update, a checkpoint or the start of
the resumed run. Then every metric of every step (but times), the logged samples, the exported models and the last
checkpoint's weights and optimizer states must be the same, bit for bit; if they are not, the exit code is 1.

`eight_bit` needs torchao, which `make test` installs into .eight_bit.
"""

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

import psutil

from benchmarks.compare_runs import records
from rlpack.checkpoint.commit import newest
from rlpack.checkpoint.restricted import INDEX, read_index

ROOT = Path(__file__).resolve().parents[1]
MARK = "RLPACK_KILLED_RUN"  # every process of a run inherits it
DEADLINE_S, GONE_S = 400.0, 30.0
SHARED = (
    "experiment=smoke",
    "sft_warmup.steps=6",
    "sft_warmup.batch_size=16",
    "trainer.steps=12",
    "trainer.prompts_per_step=8",
    "evaluation.every=4",
    "checkpoint.every=2",
    "rollout.max_new_tokens=16",
)
KL = ("algorithm.kl_coef=0.02",)
# With a lead, two threads store payloads, in any order.
UNORDERED = "store/peak_bytes"
AHEAD = ("placement=two_pools", "trainer.lead=1")
RUNS: dict[str, tuple[str, ...]] = {
    "ppo": ("recipe=ppo", "trainer.mini_batch_size=16", *KL),
    "dapo": ("recipe=dapo", "dapo.overlong_buffer=4"),
    "remax": ("recipe=remax", "trainer.group_size=1"),
    "sft": ("recipe=sft", "sft_warmup.steps=0", "trainer.group_size=1"),
    "lora": ("recipe=grpo", "actor.lora.rank=4", "actor.lora.dropout=0.1", *KL),
    "eight_bit": ("recipe=grpo", "actor.optimizer.name=adamw_8bit", "trainer.mini_batch_size=16"),
    "grpo": ("recipe=grpo", "trainer.updates_per_batch=2", "trainer.mini_batch_size=16", *KL),
    **{f"{recipe}_ahead": (f"recipe={recipe}", *AHEAD) for recipe in ("grpo", "ppo", "dapo")},
    "remax_ahead": ("recipe=remax", "trainer.group_size=1", *AHEAD),
}


@dataclass
class Outcome:
    """What became of a run in pieces: the steps it was killed after, what outlived it, and what differs."""

    killed_after: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    compared: str = ""
    differences: list[str] = field(default_factory=list)


def main() -> int:
    """Kill and compare the runs one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{'run':12}{'kills':>6}{'differ':>8}{'left':>6}{'seconds':>9}  compared; killed after", flush=True)
    failed = False
    for name in arguments.runs.split(","):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            overrides = (
                *SHARED,
                *RUNS[name],
                f"seed={arguments.seed}",
                f"placement.pools.main.ranks={arguments.ranks}",
            )
            outcome = kill_and_compare(
                Path(folder), overrides, arguments.kills, random.Random(f"{arguments.seed} {name}")
            )
        failed |= bool(outcome.differences or outcome.left_behind)
        print(
            f"{name:12}{len(outcome.killed_after):6}{len(outcome.differences):8}{len(outcome.left_behind):6}"
            f"{time.perf_counter() - began:9.1f}  {outcome.compared}; {', '.join(outcome.killed_after)}",
            flush=True,
        )
        for line in [*outcome.differences[:10], *(f"left behind: {name}" for name in outcome.left_behind)]:
            print(f"    {line}", flush=True)
    return int(failed)


def kill_and_compare(folder: Path, overrides: tuple[str, ...], kills: int, generator: random.Random) -> Outcome:
    """Do a run as a whole and in pieces, and compare both."""
    whole, pieces = folder / "whole", folder / "pieces"
    finish(start(whole, overrides))
    outcome = Outcome()
    steps = logged(whole)
    pace = records_per_s(whole)
    first = next(index for index, place in enumerate(steps) if checkpoint_follows(place))
    for index in sorted(generator.sample(range(first, len(steps) - 1), kills)):
        run = start(pieces, overrides)
        while run.process.poll() is None and len(logged(pieces)) <= index:
            assert time.perf_counter() - run.began < DEADLINE_S, f"no record after {steps[index]}: {run.output()}"
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 2 / pace))
        assert run.process.poll() is None, f"it ended before it was killed: {run.output()}"
        os.killpg(run.process.pid, signal.SIGKILL)
        outcome.killed_after.append(logged(pieces)[-1])
        outcome.left_behind += reap(run)
    finish(start(pieces, overrides))
    compare(whole, pieces, outcome)
    return outcome


@dataclass
class Running:
    """A command under way."""

    process: subprocess.Popen
    log: Path
    mark: str
    began: float = field(default_factory=time.perf_counter)

    def output(self) -> str:
        """Return the end of what it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]


def start(run_dir: Path, overrides: tuple[str, ...]) -> Running:
    """Start or continue a run in a new process group."""
    mark, log = secrets.token_hex(8), run_dir.with_suffix(".log")
    places = [str(ROOT), *([str(ROOT / ".eight_bit")] if "actor.optimizer.name=adamw_8bit" in overrides else [])]
    environment = os.environ | {MARK: mark, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-m", "rlpack", "train", f"run_dir={run_dir}", "resume=auto", *overrides]
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    return Running(process, log, mark)


def finish(run: Running) -> None:
    """Wait for the end of a run, which has to be a good one."""
    code = run.process.wait(DEADLINE_S)
    assert code == 0, f"it ended with {code}: {run.output()}"


def reap(run: Running) -> list[str]:
    """Return the names of the processes that outlive a killed run by `GONE_S`, and end them."""
    run.process.wait()
    deadline = time.perf_counter() + GONE_S
    while (alive := list(processes(run.mark))) and time.perf_counter() < deadline:
        time.sleep(0.2)
    names = []
    for process in alive:
        with suppress(psutil.Error):  # it has ended meanwhile
            names.append(f"{process.name()}, {process.status()}")
            process.kill()
    return names


def processes(mark: str) -> Iterator[psutil.Process]:
    """Yield the living processes of a run."""
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process
        except psutil.Error:  # it has ended, or is another user's
            continue


def logged(run_dir: Path) -> list[str]:
    """Return the phase and step of each record."""
    if not (run_dir / "metrics.jsonl").exists():
        return []
    try:
        return [f"{record['phase']} {record['step']}" for record in records(run_dir)]
    except ValueError:  # a line that is half written
        return []


def records_per_s(run_dir: Path) -> float:
    """Return how many records a finished run wrote per second."""
    times = [float(line.split('"time_s": ')[1].split(",")[0]) for line in (run_dir / "metrics.jsonl").open()]
    return len(times) / (times[-1] - times[0])


def checkpoint_follows(place: str) -> bool:
    """Return whether a checkpoint follows a record, by `checkpoint.every=2`."""
    phase, step = place.split()
    return phase != "evaluation" and int(step) % 2 == 0


def compare(whole: Path, pieces: Path, outcome: Outcome) -> None:
    """Note what was compared and what differs."""
    one, other = records(whole), records(pieces)
    figures = sum(len(record) for record in one)
    for number, (before, after) in enumerate(zip_longest(one, other, fillvalue={})):
        outcome.differences += [
            f"record {number}: {name}"
            for name in (before.keys() | after.keys()) - {UNORDERED}
            if before.get(name) != after.get(name)
        ]
    expected, found = digests(whole), digests(pieces)
    outcome.differences += [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    outcome.compared = f"{figures} figures, {len(expected)} tensors and files"


def digests(run_dir: Path) -> dict[str, str]:
    """Return the hashes of the samples, of all exported weights, and of each entry of the last checkpoint."""
    files = [run_dir / "samples.jsonl", *run_dir.glob("*model/*.safetensors")]
    files += (run_dir / "checkpoints" / "reference").rglob("*.safetensors")
    hashes = {str(path.relative_to(run_dir)): digest(path.read_bytes()) for path in files if path.exists()}
    last = newest(run_dir / "checkpoints" / "train")
    assert last is not None, f"{run_dir} has no checkpoint"
    for index in last.rglob(INDEX):
        for key, entry in read_index(index.parent).storage_data.items():
            with (index.parent / entry.relative_path).open("rb") as stream:
                stream.seek(entry.offset)
                hashes[f"{index.parent.name}: {key.fqn} {key.offset}"] = digest(stream.read(entry.length))
    return hashes


def digest(content: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())

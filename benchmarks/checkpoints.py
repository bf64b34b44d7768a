"""Measure how long training waits for a checkpoint of 400 MB, written synchronously and in the background.

    python benchmarks/checkpoints.py

One rank trains a small network whose weights and optimizer state take 400 MB. Checkpoints of both kinds take turns in
the same process and folder, with the session's own writer and commit protocol. Between two checkpoints the rank takes
optimizer steps; after each step the writer advances the checkpoint in flight, and that time counts as waiting.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from rlpack.checkpoint.background import BackgroundSaver
from rlpack.checkpoint.commit import newest
from rlpack.checkpoint.sharded import load_training_state, save_training_state
from rlpack.config.sections.optimization import Optimizer
from rlpack.gloo import GLOO
from rlpack.models.optimizers import build_optimizer
from rlpack.recipes.driver.checkpoint_writer import CheckpointWriter

# Weights, and two moments of each: 12 bytes a parameter.
WIDTH, LAYERS = 1024, 32
TIMEOUT_S = 600.0
LIMIT = 0.15


class Role:
    """A trained role, called as a worker group calls it."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = build_optimizer(self.model, Optimizer())
        self._saver = BackgroundSaver()

    def step(self) -> None:
        """Take an optimizer step."""
        self.optimizer.zero_grad()
        self.model(torch.randn(64, WIDTH)).square().mean().backward()
        self.optimizer.step()

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        """Run a method of `Trainable` by its name."""
        own = {
            "save": lambda folder: save_training_state(self.model, self.optimizer, Path(folder)),
            "start_save": lambda folder, timeout_s: self._saver.start(
                self.model, self.optimizer, Path(folder), timeout_s=timeout_s
            ),
            "save_is_done": self._saver.is_done,
            "finish_save": self._saver.wait,
        }
        return own[method.__name__](*args)

    @property
    def num_bytes(self) -> int:
        """The size of weights and optimizer state."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *(value for value in moments if isinstance(value, torch.Tensor))]
        return sum(tensor.nbytes for tensor in tensors)


def waited(call: Callable[[], None]) -> float:
    """Return how long a call takes, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Write checkpoints of both kinds in turn, and print how long training waits for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps between two checkpoints")
    parser.add_argument("--folder", help="where checkpoints are written; a temporary folder without")
    options = parser.parse_args()
    torch.set_num_threads(1)
    role, groups = Role(), {}
    groups["actor"] = cast(Any, role)
    at_once, in_background, steps = [], [], {True: [], False: []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = f"file://{folder}/store"
        dist.init_process_group(GLOO, init_method=store, rank=0, world_size=1)
        root, writer = Path(folder) / "checkpoints", CheckpointWriter(keep=2, timeout_s=TIMEOUT_S)
        for number in range(1, 2 * options.rounds + 1):
            background = number % 2 == 0
            start = writer.start if background else writer.save
            wait = waited(lambda start=start, number=number: start(root, number, groups, {}))
            for _ in range(options.steps):
                steps[background].append(waited(role.step))
                if background:
                    wait += waited(writer.advance)
            wait += waited(writer.finish)
            (in_background if background else at_once).append(wait)
        role.step()
        found = newest(root)
        assert found is not None, f"no checkpoint in {root}"
        assert found == root / f"step-{2 * options.rounds}", found
        load_training_state(role.model, role.optimizer, found / "actor")
        dist.destroy_process_group()
    print(f"{role.num_bytes / 1e6:.0f} MB of weights and optimizer state, {options.rounds} rounds in turn")
    for name, times in (("at once", at_once), ("in background", in_background)):
        print(f"{name:14} training waits {statistics.median(times):5.2f} s ({min(times):.2f} to {max(times):.2f})")
    slower = statistics.median(steps[True]) / statistics.median(steps[False])
    print(f"a step takes {slower:.2f} times as long while a checkpoint may be written")
    ratio = statistics.median(in_background) / statistics.median(at_once)
    print(f"ratio: {ratio:.3f} (at most {LIMIT})")
    sys.exit(ratio > LIMIT)


if __name__ == "__main__":
    main()

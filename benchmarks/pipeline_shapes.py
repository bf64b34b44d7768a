"""Show that a schedule of `torch.distributed.pipelining` takes the shapes of its messages from its first step.

    python -m benchmarks.pipeline_shapes

Two gloo ranks run `Schedule1F1B` with rows of one width, and then of another one. With equal widths, both steps work.
With others, gloo aborts a rank, as of PyTorch 2.13. This is why rlpack has its own schedules, in which every stage
knows the width of each message (`rlpack/models/pipeline_schedule.py`). Exits with 1 if PyTorch behaves otherwise.
"""

import multiprocessing
import signal
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from rlpack.gloo import GLOO

WIDTH, ROWS, DEADLINE_S = 8, 2, 60.0


def two_steps(rank: int, store: str, slots: tuple[int, int]) -> None:
    """Take a step on rows of each number of slots, as one of two stages."""
    torch.distributed.init_process_group(GLOO, init_method=f"file://{store}", rank=rank, world_size=2)
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=ROWS, loss_fn=lambda output, target: (output - target).square().sum())
    for count in slots:
        rows = torch.ones(ROWS, count, WIDTH)
        if rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=rows)
    torch.distributed.destroy_process_group()


def exit_codes(slots: tuple[int, int]) -> list[int | None]:
    """Return how the two ranks ended; None for one that had to be killed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=two_steps, args=(rank, store, slots)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
    return codes


def main() -> int:
    """Take two steps with equal widths, and with different ones."""
    equal, different = exit_codes((6, 6)), exit_codes((6, 10))
    print(f"6 and 6 slots: exit codes {equal}\n6 and 10 slots: exit codes {different}")
    return int(equal != [0, 0] or -signal.SIGABRT not in different)


if __name__ == "__main__":
    sys.exit(main())

"""Roles that the tests of calls start: one that answers, one that fails on request."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import Bucket, pack_bucket
from rlpack.batch.errors import DataError
from rlpack.rollout.bucket_receiver import BucketReceiver
from rlpack.worker import RankContext, Worker, broadcast, one_rank, rank_zero, sharded


def _sum(counts: list[int]) -> int:
    return sum(counts)


def suffer(fault: str) -> None:
    """Let a fault happen to this process."""
    if fault == "exception":
        raise ValueError("an exception of the role")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


class Echo(Worker):
    """Answers with what it was given, rows in the order of its microbatches."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.begun, self.released = threading.Event(), threading.Event()
        self.noted = 0
        self.notes: Path | None = None
        self.alone, self.second = threading.Lock(), threading.Event()

    kept: BatchedDataDict
    factor = 1
    harm: tuple[int, str] | None = None

    @sharded()
    def times(self, shard: BatchedDataDict, factor: int) -> BatchedDataDict:
        rows = [row for step in range(shard.num_steps) for view in shard.microbatches(step) for row in view.index]
        back = shard.select(rows[::-1])
        tokens = back["input_ids"]
        ranks = torch.full((back.num_rows,), self.context.rank)
        return back.keep(["uid"]).union({"times": tokens.with_values(tokens.values * factor), "rank": ranks})

    @broadcast
    def set_factor(self, factor: int) -> None:
        """Set a state that a process which is started again lacks."""
        self.factor = factor

    @sharded()
    def times_after_faults(self, shard: BatchedDataDict, faults: dict[int, list[str]], folder: str) -> BatchedDataDict:
        """Return what `times` does with the factor that was set; first, every rank suffers its faults, each once."""
        for place, fault in enumerate(faults.get(self.context.rank, [])):
            mark = Path(folder) / f"{self.context.rank}-{place}-{fault}"
            if not mark.exists():
                mark.touch()
                suffer(fault)
                break
        dist.barrier()
        return self.times(shard, self.factor)

    @one_rank(reads=("uid",), returns=("uid",))
    def hand_back(self, rows: BatchedDataDict) -> BatchedDataDict:
        return rows

    @one_rank(reads=("input_ids",), returns=("input_ids",))
    def hand_back_tokens(self, rows: BatchedDataDict) -> BatchedDataDict:
        return rows

    @broadcast
    def replace_failed_engine(self) -> bool:
        """Take as long as an engine that starts."""
        time.sleep(2.0)
        return self.context.rank == 1

    @one_rank(reads=("uid",), returns=("uid",))
    def hand_back_late(self, rows: BatchedDataDict, seconds: float) -> BatchedDataDict:
        time.sleep(seconds)
        return rows

    @sharded(background=True)
    def sleep_in_background(self, shard: BatchedDataDict, seconds: float) -> BatchedDataDict:
        time.sleep(seconds)
        return shard.keep([])

    @sharded(background=True)
    def times_in_background(self, shard: BatchedDataDict, factor: int) -> BatchedDataDict:
        tokens = shard["input_ids"]
        return shard.keep([]).union({"times": tokens.with_values(tokens.values * factor)})

    @sharded()
    def scores(self, shard: BatchedDataDict, width: int) -> BatchedDataDict:
        """Return a tensor of several numbers a row."""
        firsts = torch.stack([row[0] for row in shard["input_ids"].rows()])
        return shard.keep([]).union({"scores": firsts[:, None] + torch.arange(width)})

    @sharded(background=True)
    def answer_once_released(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Wait for another call of this process, which `release` is."""
        self.begun.set()
        released = self.released.wait(timeout=60)
        tokens = shard["input_ids"]
        return shard.keep([]).union({"times": tokens.with_values(tokens.values * (3 if released else 0))})

    @broadcast
    def release(self) -> bool:
        """Let that call go on; return whether it was under way."""
        under_way = self.begun.wait(timeout=60)
        self.released.set()
        return under_way

    @sharded(background=True)
    def break_in_background(self, shard: BatchedDataDict) -> BatchedDataDict:
        raise ValueError("a call in the background failed")

    @sharded(background=True)
    def overlaps(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return for each row whether another call of this method was under way at the same time."""
        if overlap := not self.alone.acquire(blocking=False):
            self.second.set()
        else:
            overlap = self.second.wait(timeout=0.5)
            self.alone.release()
        return shard.keep([]).union({"overlaps": torch.full((shard.num_rows,), overlap)})

    @sharded()
    def note_rows(self, shard: BatchedDataDict) -> BatchedDataDict:
        self.noted += shard.num_rows
        return shard.keep([])

    @broadcast
    def read_noted(self) -> list[int]:
        """Return the rows that each rank noted."""
        every: list[int | None] = [None] * self.context.num_ranks
        dist.all_gather_object(every, self.noted)
        return [count for count in every if count is not None]

    @sharded(merge=list)
    def keep_shard(self, shard: BatchedDataDict) -> int:
        self.kept = shard
        return shard.num_rows

    @broadcast
    def read_kept(self) -> str:
        try:
            return str(self.kept["times"])
        except DataError as error:
            return str(error)

    @sharded()
    def again(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return a column that was given, unread."""
        return shard.keep(["times"])

    @sharded()
    def resharded(self, shard: BatchedDataDict) -> BatchedDataDict:
        (own,) = shard.shard_by_batch_size(1, sequence_packing={"max_tokens": 32})
        views = [view.rows for view in own.microbatches()]
        return shard.keep([]).restore([BatchedDataDict.concat(views).keep(["input_ids"])])

    @sharded(merge=list)
    def rows_read(self, shard: BatchedDataDict) -> tuple[int, int]:
        """Return how many rows the rank was given, and how many lie in the parts that it reads."""
        asked: list[Any] = []
        reader = shard.reader
        assert reader is not None
        shard.reader = lambda parts: asked.append(parts) or reader(parts)
        assert shard["times"].num_rows == shard.num_rows
        return shard.num_rows, sum(part["times"].num_rows for parts in asked for part in reader(parts))

    @sharded(merge=_sum)
    def count_rows(self, shard: BatchedDataDict) -> int:
        return shard.num_rows

    @sharded(mini_batches=True, merge=_sum)
    def count_steps(self, shard: BatchedDataDict) -> int:
        return shard.num_steps

    @broadcast
    def add_up(self, value: float, *, scale: float = 1.0) -> float:
        total = torch.tensor(value * scale * (self.context.rank + 1))
        dist.all_reduce(total)
        return total.item()

    @rank_zero
    def place(self) -> tuple[str, int, int]:
        return self.context.pool, self.context.rank, self.context.num_ranks

    @broadcast
    def open_weights(self, form: torch.dtype) -> list[int]:
        self.buckets = [torch.full((count,), float(count), dtype=form) for count in range(1, 6)]
        return list(range(len(self.buckets)))

    @broadcast
    def export_bucket(self, index: int, form: torch.dtype, version: int) -> Bucket | None:
        dist.barrier()
        is_owner = index % self.context.num_ranks == self.context.rank
        if is_owner:
            self._note(f"export {index}")
        weights = {f"weight {index}": self.buckets[index].clone()}
        bucket = pack_bucket(weights, index=index, count=len(self.buckets), version=version)
        if self.harm == (index, "delay"):
            time.sleep(600)
        if self.harm == (index, "bit flip"):
            weights[f"weight {index}"].view(torch.int16)[-1] ^= 1  # the bucket shares its memory
        return bucket if is_owner else None

    @rank_zero
    def weights_form(self) -> torch.dtype:
        return torch.bfloat16

    @broadcast
    def check_weights(self, layout: list[int]) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.received = BucketReceiver("echo")
        self.received.open(len(layout))

    @broadcast
    def load_bucket(self, bucket: Bucket, version: int) -> None:
        time.sleep(0.1)
        if self.harm == (len(self.loaded), "death"):
            os.kill(os.getpid(), signal.SIGKILL)
        with self.received.receive(bucket, version) as weights:
            self.loaded |= {name: weight.clone() for name, weight in weights.items()}
        self._note(f"load {len(self.loaded) - 1}")

    @broadcast
    def finish_transfer(self, version: int) -> None:
        self.received.check_complete(version)
        self.received.close()

    @broadcast
    def harm_bucket(self, index: int, kind: str) -> None:
        """Damage a bucket after it is packed, or delay it beyond every deadline, from now on."""
        self.harm = (index, kind)

    @broadcast
    def note_into(self, path: str) -> None:
        """Write down, in a file of all ranks, when buckets are exported and loaded."""
        self.notes = Path(path)

    def _note(self, line: str) -> None:
        if self.notes is not None:
            with self.notes.open("a") as file:
                file.write(f"{line}\n")

    @sharded(merge=list)
    def loaded_weights(self, shard: BatchedDataDict) -> dict[str, Tensor]:
        return self.loaded

    def undecorated(self) -> None: ...


class ExportError(Exception):
    """Can be pickled, and not be read again: as exceptions are whose text is not their only argument."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"no {what}: {why}")


class Faulty(Worker):
    """Fails on one rank, while the others wait in a collective for it."""

    @sharded()
    def nothing(self, shard: BatchedDataDict) -> Any:
        return {"rewards": [0.0] * shard.num_rows}

    @broadcast
    def explode(self, rank: int) -> None:
        if self.context.rank == rank:
            raise ValueError("the judge has left the building")
        dist.barrier()

    @sharded()
    def explode_over_rows(self, shard: BatchedDataDict) -> BatchedDataDict:
        self.explode(1)
        return shard.keep([])

    @sharded()
    def hang_over_rows(self, shard: BatchedDataDict) -> BatchedDataDict:
        time.sleep(600)
        return shard

    @sharded(background=True)
    def hang_in_background(self, shard: BatchedDataDict) -> BatchedDataDict:
        time.sleep(600)
        return shard

    @sharded()
    def hang_over_rows_of(self, shard: BatchedDataDict, rank: int) -> BatchedDataDict:
        if self.context.rank == rank:
            time.sleep(600)
        return shard.keep([])

    @broadcast
    def lose_touch(self) -> None:
        raise RuntimeError("connection closed by peer")

    @broadcast
    def wait_for_all(self) -> None:
        dist.barrier()

    @broadcast
    def die(self, rank: int) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @broadcast
    def hang(self, rank: int) -> None:
        if self.context.rank == rank:
            time.sleep(600)

    @broadcast
    def open_weights(self, form: torch.dtype) -> list[int]:
        return [0, 1]

    @broadcast
    def export_bucket(self, index: int, form: torch.dtype, version: int) -> Bucket | None:
        if index == 1 and self.context.rank == 1:
            if self.context.pool == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ExportError("weights", "nothing to export")
        if index == 1:
            dist.barrier()
        return pack_bucket({}, index=index, count=2, version=version) if self.context.rank == index else None

    @rank_zero
    def weights_form(self) -> torch.dtype:
        return torch.float32

    @broadcast
    def check_weights(self, layout: list[int]) -> None: ...

    @broadcast
    def load_bucket(self, bucket: Bucket, version: int) -> None: ...

    @broadcast
    def finish_transfer(self, version: int) -> None: ...


# That a part is being scored; roles of one pool share a process.
_SCORED = threading.Event()


class Sampler(Worker):
    """Responds to everything alike; from its second call on it waits until its first responses are being scored."""

    calls = 0

    @sharded()
    def generate(self, shard: BatchedDataDict, params: Any) -> BatchedDataDict:
        self.calls += 1
        in_time = self.calls == 1 or _SCORED.wait(timeout=60)
        ids = shard["input_ids"]
        columns = {"input_ids": ids, "response_mask": ids.with_values(torch.ones_like(ids.values, dtype=torch.bool))}
        texts = ["in time" if in_time else "late"] * shard.num_rows
        zeros = ids.with_values(torch.zeros(ids.values.shape))
        versions = ids.with_values(torch.ones(ids.values.shape, dtype=torch.int32))
        rows = {"rollout_logprobs": zeros, "policy_version": versions, "response_lengths": ids.lengths}
        rows |= {"prompt_lengths": torch.zeros_like(ids.lengths), "finish_reason": ["stop"] * len(texts)}
        return shard.keep(["uid", "group_ids"]).union({**columns, **rows, "completion": texts})


class Listener(Worker):
    """Scores a row by its text."""

    @sharded(background=True)
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        _SCORED.set()
        rewards = torch.tensor([float(text == "in time") for text in shard["completion"]])
        return shard.keep([]).union({"rewards": rewards, "quarantined": torch.zeros_like(rewards, dtype=torch.bool)})

"""The Ray actor behind one rank: a `RankProcess` that reads batches from the object store and puts results there."""

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeGuard

import numpy as np
import ray

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import OffloadedBatch, select_rows
from rlpack.config.sections.submission import JOB_FILES_VARIABLE
from rlpack.distributed.context import RankContext
from rlpack.distributed.object_handles import END_OF_CALL, ObjectHandle, ObjectReader, handles_of
from rlpack.distributed.process import RankProcess
from rlpack.distributed.rank_processes import ProcessId
from rlpack.distributed.ray_watch import RayWatch
from rlpack.distributed.run_token import TOKEN
from rlpack.distributed.usage import Measured, Usage


class RankActor(RankProcess):
    """`RankProcess` with access to Ray: it knows its node, reads stored columns and stores its results.

    Ray 2.60 has a race if one thread drops the last reference to an object while another one receives a reference to
    the same object: Ray may then forget that the object exists, and the next `ray.get` never returns. Calls in the
    background share batches with the calls after them. The thread that receives calls therefore drops all references.
    """

    def __init__(
        self, context: RankContext, threads: int, import_path: Sequence[str] = (), silence_s: float | None = None
    ) -> None:
        """Prepare the process; in a submitted job, in the folder of the job's files on this node.

        Args:
            context: the rank's place in its pool.
            threads: number of PyTorch threads.
            import_path: directories that modules are imported from, after Python's own.
            silence_s: end this process once the cluster's GCS has been silent for this long, because neither the driver
                nor Ray may be able to end it without the GCS; None for never.
        """
        super().__init__(context, threads, [*import_path, *_enter_job_files()])
        if silence_s is not None:
            RayWatch().start_asking({"GCS": ray.get_runtime_context().gcs_address}, silence_s, "Ray's logs")
        self._receiver = get_ident()
        self._unneeded: deque[ObjectHandle] = deque()  # of calls that ended
        os.environ.pop(TOKEN, None)  # Ray has read it; a user's role has no use for it
        if not gc.isenabled():  # see `rlpack.distributed.imports_without_gc`; what was imported is never garbage
            gc.freeze()
            gc.enable()

    def node_ip(self) -> str:
        """Return the address of this rank's node."""
        return ray.util.get_node_ip_address()

    def process_id(self) -> ProcessId:
        """Return the identity of this process."""
        return ProcessId.own()

    def node(self) -> str:
        """Return Ray's id of this rank's node."""
        return ray.get_runtime_context().get_node_id()

    def call(self, role: str, method: str, kwargs: dict[str, Any], *args: Any) -> Any:
        """Run a method of a role; the batches among its arguments can be read until it returns."""
        with self._readable([*args, *kwargs.values()]):
            result = super().call(role, method, kwargs, *args)
            return BatchedDataDict(dict(result), row_ids=result.row_ids) if is_batch(result) else result

    def call_rows(self, call_id: int, role: str, method: str, kwargs: dict[str, Any], *args: Any) -> OffloadedBatch:
        """Run a method that returns rows; the batches among its arguments can be read until it returns."""
        with self._readable([*args, *kwargs.values()]):
            return super().call_rows(call_id, role, method, kwargs, *args)

    def result(self, call_id: int, wait_s: float) -> OffloadedBatch | float:
        """Do what `RankProcess.result` does, and free batches that are no longer needed."""
        try:
            return super().result(call_id, wait_s)
        finally:
            self._free_objects()

    def measure(self, method: str, *args: Any) -> Measured:
        """Run one of this class's own methods, such as `call_rows`, and measure it."""
        began = time.perf_counter()
        result = getattr(self, method)(*args)
        return Measured(result, Usage.since(began))

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns in this process."""
        return function(*args)

    def store_columns(self, call_id: int) -> tuple[Any, ...]:
        """Return None and the offloaded columns of a call's rows: one object each, which the driver owns.

        The driver waits for the first. It doesn't fetch the others, unless they are so small that Ray sends them with
        the reply (100 kB).
        """
        return None, *self.pop_columns(call_id)

    def copy_rows(self, rows: Sequence[dict[str, np.ndarray]], *payloads: dict[str, Any]) -> list[dict[str, Any]]:
        """Return only these rows of objects on this node: for each, rows by column, int64 [n]."""
        return [select_rows(payload, index) for payload, index in zip(payloads, rows, strict=True)]

    def await_value(self, value: Any) -> None:
        """Do nothing: Ray runs this call once `value`, the result of a method of this rank, exists."""

    @contextmanager
    def _readable(self, values: list[Any]) -> Iterator[None]:
        """Let a role read the batches among its arguments until its call ends.

        A role that keeps a batch would otherwise keep its objects alive, while the driver counts them as freed.
        """
        batches = [value for value in values if is_batch(value)]
        handles = [handle for batch in batches for handle in handles_of(batch)]
        reader = ObjectReader()
        for batch in batches:
            batch.reader = reader
        try:
            yield
        finally:
            reader.close()
            self._unneeded.extend(handles)
            if get_ident() == self._receiver:
                self._free_objects()

    def _free_objects(self) -> None:
        """Drop the references of calls that ended."""
        while self._unneeded:
            self._unneeded.popleft().free(END_OF_CALL)


def _enter_job_files() -> list[str]:
    """Change to the folder of a submitted job's files on this node and return it; [] if there is none."""
    folder = os.environ.get(JOB_FILES_VARIABLE)
    if folder is None:
        return []
    os.chdir(folder)
    return [os.getcwd()]


def is_batch(value: Any) -> TypeGuard[BatchedDataDict]:
    """Whether an argument or a result is a batch."""
    return isinstance(value, BatchedDataDict)

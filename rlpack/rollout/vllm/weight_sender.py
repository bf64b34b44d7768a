"""Send buckets of weights to vLLM's process, which loads one while the next is written.

Buckets are in the memory of the GPUs that both use, if it has room and the process can open it (`device_buffers`), else
in shared memory (`weight_buffers`).

Invariants (tests/vllm/test_weights.py):

1. at most two buckets are in flight: a buffer is overwritten only after its bucket was loaded;
2. a failed bucket is reported by a later `send`, or by `finish` at the latest; after that, nothing is sent until
   `restart`.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rlpack.rollout.errors import BucketError, EngineError
from rlpack.rollout.vllm.deadlines import Deadline
from rlpack.rollout.vllm.device_buffers import DeviceBuffers
from rlpack.rollout.vllm.event_loop import EventLoop, StartedCall
from rlpack.rollout.vllm.weight_buffers import NUM_BUFFERS, Buffers, WeightBuffers

logger = logging.getLogger(__name__)

_OPEN, _BEGIN = "open the transfer of weights", "begin an update of its weights"


class WeightSender:
    """The rank's side of weight updates.

    Attributes:
        buffers: where buckets are written.
        num_workers: number of vLLM's workers, several with tensor parallelism.
    """

    def __init__(
        self, front_end: Any, loop: EventLoop, explain: Callable[[Exception], str], deadline: Deadline
    ) -> None:
        """Wrap a running front end of vLLM.

        Args:
            front_end: a `vllm.v1.engine.async_llm.AsyncLLM`.
            loop: runs its coroutines.
            explain: returns the cause of an error raised by vLLM.
            deadline: deadline of each call.
        """
        self.num_workers = 1
        self._front_end, self._loop, self._explain, self._deadline = front_end, loop, explain, deadline
        self.buffers: Buffers = WeightBuffers()
        self._on_their_way: deque[tuple[int, StartedCall[Any]]] = deque()
        self._next_index: int | None = None
        self._has_failed = False

    def open(self, on_gpus: DeviceBuffers | None = None) -> None:
        """Prepare vLLM's process for buckets: on its GPUs if it can read them there, else in shared memory.

        Args:
            on_gpus: empty buffers on the engine's GPUs; None for an engine on a CPU.

        Raises:
            EngineError: vLLM's process can't be reached.
        """
        problem = "" if on_gpus is None else self._try_devices(on_gpus)
        if on_gpus is None or problem:
            self._call(self._opening({}), _OPEN)
        if problem:
            logger.warning(
                "rollout.engine=vllm: new weights reach the engine through host memory, which is slower, because "
                "CUDA IPC failed: %s",
                problem,
            )

    def _try_devices(self, buffers: DeviceBuffers) -> str:
        """Use buffers on GPUs if vLLM's process can read them; return "", or the reason why it can't."""
        try:
            note = buffers.write({"trial": torch.arange(1024)}, 0)
            self._call(self._opening({"trial": asdict(note)}), _OPEN)
            failures: list[str] = self._call(self._front_end.collective_rpc("why_trial_failed"), _OPEN)
        except (EngineError, RuntimeError) as error:  # CUDA's errors are RuntimeErrors
            return str(error)
        finally:
            buffers.end_update()
        failure = next(filter(None, failures), "")
        if not failure:
            self.buffers.close()
            self.buffers = buffers
        return failure

    def restart(self) -> None:
        """Drop an unfinished update, if there is one; all of its weights have to be sent again.

        Raises:
            EngineError: vLLM's process can't be reached, or several workers had an update that failed.
        """
        is_open, has_failed = self._next_index is not None, self._has_failed
        try:
            self._wait_for(0)
        except BucketError:
            has_failed = True
        if has_failed and self.num_workers > 1:
            # vLLM reads the workers' answers up to the first error, and takes the others for answers to later calls.
            raise EngineError("an update of weights failed, after which an engine on several GPUs can't be used")
        if is_open and not has_failed:  # vLLM itself ends an update if a bucket fails
            self._call(self._front_end.finish_weight_update(), "drop an update of its weights")
        self.buffers.end_update()
        self._next_index, self._has_failed = None, False

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Write a bucket and announce it; returns before it is loaded.

        Args:
            weights: whole tensors on the CPU by their names in a checkpoint.

        Raises:
            BucketError: an earlier bucket was not loaded.
            EngineError: an earlier call has failed, or vLLM's process can't be reached.
        """
        if self._has_failed:
            raise EngineError("an earlier bucket of this update was not loaded; call check_weights to begin again")
        index = self._next_index or 0
        opening = None
        if self._next_index is None:
            opening = self._loop.start(self._front_end.start_weight_update(), self._deadline, _BEGIN)
            self._next_index = 0  # from here on `restart` has an update to drop, even if the bucket isn't written
        self._wait_for(NUM_BUFFERS - 1)
        note = self.buffers.write(weights, index)
        if opening is not None:
            self._end(opening, _BEGIN)
        what = f"load bucket {index} of the weights"
        call = self._loop.start(self._update({"note": asdict(note)}), self._deadline, what)
        self._on_their_way.append((index, call))
        self._next_index = index + 1

    def finish(self) -> None:
        """Wait until all buckets are loaded, and have vLLM use the weights.

        Raises:
            BucketError: a bucket was not loaded.
            EngineError: no bucket was sent, weights are missing, or a deadline passed.
        """
        if not self._next_index or self._has_failed:
            raise EngineError("no bucket of weights arrived before the update was to end")
        self._wait_for(0)
        self._has_failed = True  # unless the update is complete
        self._call(self._update({"count": self._next_index}), "complete an update of its weights")
        self._next_index, self._has_failed = None, False
        self._call(self._front_end.finish_weight_update(), "apply its new weights")
        self.buffers.end_update()

    def close(self) -> None:
        """Free the buffers."""
        self.buffers.close()

    def _opening(self, fields: dict[str, Any]) -> Any:
        """Return a call with the fields of a `SharedInit`."""
        from rlpack.rollout.vllm import library

        return self._front_end.init_weight_transfer_engine(library.WeightTransferInitRequest(init_info=fields))

    def _update(self, fields: dict[str, Any]) -> Any:
        """Return a call with the fields of a `SharedUpdate`."""
        from rlpack.rollout.vllm import library

        return self._front_end.update_weights(library.WeightTransferUpdateRequest(update_info=fields))

    def _wait_for(self, num_left: int) -> None:
        """Wait until at most `num_left` buckets are in flight.

        Raises:
            BucketError: a bucket was not loaded.
        """
        while len(self._on_their_way) > num_left:
            index, call = self._on_their_way.popleft()
            try:
                call.result()
            except Exception as error:
                self._has_failed = True
                self._let_end()
                reason = str(error) if isinstance(error, EngineError) else self._explain(error)
                raise BucketError(f"vLLM could not load bucket {index} of the weights: {reason}", index) from error

    def _let_end(self) -> None:
        """Wait for the buckets after a failed one; vLLM refuses them."""
        while self._on_their_way:
            _, call = self._on_their_way.popleft()
            with suppress(Exception):
                call.result()

    def _call(self, coroutine: Any, what: str) -> Any:
        """Run a call, wait for it, and return its result."""
        return self._end(self._loop.start(coroutine, self._deadline, what), what)

    def _end(self, call: StartedCall[Any], what: str) -> Any:
        """Wait for a call and return its result; raise its errors as an `EngineError` that describes it."""
        try:
            return call.result()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not {what}: {self._explain(error)}") from error

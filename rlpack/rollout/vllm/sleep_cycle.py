"""Put vLLM to sleep and wake it, so that roles that share its GPUs can use their memory.

Invariants (tests/vllm/test_sleep.py):

1. an engine that isn't fully awake refuses requests immediately; vLLM itself would let them wait forever;
2. an update wakes the weights before its first bucket, and the KV cache, which is larger, only after its last;
3. weights that were discarded are restored only by an update.
"""

from collections.abc import Callable
from typing import Any

import torch

from rlpack.rollout.errors import EngineError

# vLLM's names for the parts that sleep. An engine is awake once both are.
_WEIGHTS, _CACHE = "weights", "kv_cache"


class SleepCycle:
    """The parts of an engine that sleep."""

    def __init__(self, front_end: Any, run: Callable[[Any, str], Any], level: int) -> None:
        """Wrap an engine that is awake.

        Args:
            front_end: a `vllm.v1.engine.async_llm.AsyncLLM`.
            run: runs one of its coroutines; the second argument describes it for errors.
            level: 0 frees nothing, 1 moves weights to host memory and discards the KV cache, 2 discards both.
        """
        self._front_end, self._run, self._level = front_end, run, level
        self._asleep: list[str] = []
        self._has_lost_weights = False

    def sleep(self) -> None:
        """Free the memory, and abort all requests; no effect if any part already sleeps.

        Raises:
            EngineError: vLLM's process can't be reached.
        """
        if self._level > 0 and not self._asleep:
            self._run(self._front_end.sleep(self._level), "sleep")
            self._asleep, self._has_lost_weights = [_WEIGHTS, _CACHE], self._level > 1

    def wake(self) -> bool:
        """Wake everything and return True; if the weights were discarded, wake nothing and return False.

        Raises:
            EngineError: vLLM's process can't be reached, or the GPU has no room.
        """
        if self._asleep and not self._has_lost_weights:
            self.prepare_update()
            self.end_update()
        return not self._asleep

    def prepare_update(self) -> None:
        """Wake the weights, which an update overwrites.

        Raises:
            EngineError: as for `wake`.
        """
        if _WEIGHTS in self._asleep:
            self._wake(_WEIGHTS)

    def end_update(self) -> None:
        """Wake the KV cache, after an update has loaded all weights.

        Raises:
            EngineError: as for `wake`.
        """
        self._has_lost_weights = False
        if self._asleep and not self._wake(_CACHE):
            raise EngineError("vLLM still sleeps after its weights and its KV cache were woken")

    def check_awake(self) -> None:
        """Raise unless the engine is awake.

        Raises:
            EngineError: it sleeps.
        """
        if self._asleep:
            raise EngineError(
                f"the engine sleeps ({' and '.join(self._asleep)}), so that other roles can use its GPUs; generate "
                "within `with engines_awake(session, step):`, or set rollout.sleep_level=0"
            )

    def _wake(self, part: str) -> bool:
        """Wake one part; return whether vLLM is fully awake."""
        torch.cuda.empty_cache()  # frees memory that the trainer, in this process, has cached
        is_awake = self._run(self._front_end.wake_up([part]), f"wake its {part}")
        self._asleep.remove(part)
        return bool(is_awake)

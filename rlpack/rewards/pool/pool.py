"""The killable pool: reward functions run in processes that can be ended at any moment, whatever they do.

    rows of every function ──► calls of at most `rows_per_call` rows ──► whichever child is free ──► a verdict a row

1. Every row of every function gets exactly one verdict.
2. A call that is late is ended by the kernel, with its process and all that this one started; no signal handler and no
   thread takes part, so code that never yields can't put it off.
3. A call of several rows that raised, died or was late is repeated row by row, so no row falls with another.
4. A child that was ended is replaced at once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlpack.rewards.errors import PoolError, RewardError
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.call_queue import Call, PoolSettings, Target, Work
from rlpack.rewards.pool.processes import Child, Event, Processes, printable
from rlpack.rewards.reward_result import GIVEN_UP, LARGEST, PROBLEMS, Problem, Verdict
from rlpack.rewards.signatures import Form, parsed_form

# Coroutines are given up by their own process at the deadline; so much later it is ended instead.
_ASYNC_GRACE_S = 0.5
_SETTLE_S = 2.0
_START_S = 120.0


class Pool:
    """Processes that run reward functions."""

    def __init__(self, functions: Mapping[str, Target], settings: PoolSettings | None = None) -> None:
        """Start them, and wait for nothing."""
        self._functions = functions
        settings = settings or PoolSettings()
        self._settings = settings
        self._forms: dict[str, Form] = {}
        self._calls: dict[int, Call] = {}
        self._numbers = 0
        self._work = Work(functions, self._forms, {}, 0)
        loadable = {name: asdict(target) for name, target in functions.items()}
        self._processes = Processes(loadable, settings.limits, strict=settings.strict, environment=settings.environment)
        for _ in range(settings.processes):
            self._processes.start()

    @property
    def output_bytes(self) -> int:
        """Return how much the functions have written to their standard output and error so far."""
        return self._processes.output_bytes

    @property
    def is_full(self) -> bool:
        """Whether every process is there and ready."""
        children = self._processes.children.values()
        return len(children) == self._settings.processes and all(child.is_ready for child in children)

    @property
    def output(self) -> str:
        """Return the end of what the functions wrote, for those that still run."""
        return " ".join(child.said for child in self._processes.children.values() if child.tail)

    def close(self) -> None:
        """End all processes, and remove what they wrote."""
        self._processes.close()

    def wait(self, condition: Callable[[], bool] | None = None, timeout_s: float = _START_S) -> None:
        """Wait until every process is ready, or for the condition.

        Raises:
            RewardError: a function can't be loaded.
            PoolError: the processes don't start, or can't be confined.
        """
        deadline = time.monotonic() + timeout_s
        while not (condition() if condition else self.is_full):
            if time.monotonic() > deadline:
                raise PoolError(
                    f"the reward processes were not ready within {timeout_s:g} s; they import "
                    f"{', '.join(target.target for target in self._functions.values())}"
                )
            self._hear(deadline)

    def forms(self) -> Mapping[str, Form]:
        """Return how each function is called; waits for the first process."""
        self.wait(lambda: bool(self._forms))
        return self._forms

    def run(
        self, columns: Mapping[str, Sequence[Any]], num_rows: int, allowed: float = float("inf")
    ) -> dict[str, list[Verdict]]:
        """Return every function's verdict on every row.

        Args:
            columns: `prompt`, `completion` and the dataset's, by name, `num_rows` entries each.
            num_rows: B.
            allowed: most rows that may fail; one more, and what is left is not begun: it counts as failed, too.

        Raises:
            RewardError: a function can't be loaded, or a column can't be sent to it.
            PoolError: the processes don't start, or can't be confined.
        """
        self.forms()
        for number in list(self._calls):  # of a batch that ended with an error
            del self._calls[number]
            self._processes.kill(self._processes.children[number])
        self._work = Work(self._functions, self._forms, columns, num_rows, allowed)
        self._work.share_out(self._settings)
        deadline = time.monotonic() + self._settings.batch_timeout_s
        while self._work.queue or self._calls:
            if time.monotonic() > deadline:
                text = f"the batch took longer than reward.batch_timeout_s={self._settings.batch_timeout_s:g}"
                self._give_up("timeout", text)
                break
            if self._work.is_hopeless:
                self._give_up("error", f"not begun, {GIVEN_UP}")
                break
            self._hand_out()
            self._hear(min([deadline, *(call.deadline for call in self._calls.values())]))
            self._end_late()
        self._settle()
        return self._work.result()

    def _hear(self, until: float) -> None:
        """Take in what the children do, once, and wait for it until then at the latest."""
        for event in self._processes.step(until - time.monotonic()):
            self._take(event)

    def _hand_out(self) -> None:
        """Give the next calls to the children that are free."""
        for child in list(self._processes.children.values()):
            if not self._work.queue:
                return
            if not child.is_ready or child.is_dying or child.number in self._calls:
                continue
            call = self._work.next()
            self._numbers += 1
            self._processes.send(child, self._work.message(self._numbers, call))
            self._calls[child.number] = call
            self._restart_clock(call)

    def _restart_clock(self, call: Call) -> None:
        grace_s = _ASYNC_GRACE_S if self._forms[call.function].is_async else 0.0
        call.deadline = time.monotonic() + self._functions[call.function].timeout_s + grace_s

    def _end_late(self) -> None:
        now = time.monotonic()
        for number, call in list(self._calls.items()):
            if now >= call.deadline:
                limit = self._functions[call.function].timeout_s
                self._work.fail(self._calls.pop(number), "timeout", f"took longer than {limit:g} s")
                self._processes.kill(self._processes.children[number])

    def _give_up(self, problem: Problem, text: str) -> None:
        for number, call in list(self._calls.items()):
            del self._calls[number]
            self._work.settle(call, problem, text)
            self._processes.kill(self._processes.children[number])
        while self._work.queue:
            self._work.settle(self._work.next(), problem, text)

    def _settle(self) -> None:
        """Wait until every child that was ended is replaced, which takes milliseconds."""
        deadline = time.monotonic() + _SETTLE_S
        while any(child.is_dying for child in self._processes.children.values()) and time.monotonic() < deadline:
            self._hear(deadline)

    def _take(self, event: Event) -> None:
        """Take in what a child said or that it ended."""
        child = event.child
        if event.kind == "ended":
            self._replace(child, event.text)
        elif child.is_dying and event.kind == "garbage":
            pass
        elif event.kind == "garbage" or not self._understand(child, event.message):
            call = self._calls.pop(child.number, None)
            if call is not None:
                self._work.fail(call, "killed", "its process said what no reward process says")
            if child.number in self._processes.children:
                self._processes.kill(child)

    def _replace(self, child: Child, how: str) -> None:
        said = f"; it wrote: …{child.said[-300:]}" if child.said else ""
        if not child.is_ready:
            raise PoolError(f"a reward process could not start: {how}{said}")
        call = self._calls.pop(child.number, None)
        if call is not None:
            self._work.fail(call, "killed", how + said)
        self._processes.start()

    def _understand(self, child: Child, message: wire.Message) -> bool:
        """Take a child's message; False when it makes no sense."""
        match message:
            case {"failed": str(text)} if not child.is_ready:
                raise RewardError(f"a reward process can't load its functions: {printable(text)}")
            case {"ready": dict(forms)} if not child.is_ready and forms.keys() == self._functions.keys():
                found = {name: parsed_form(form) for name, form in forms.items()}
                self._forms = {name: form for name, form in found.items() if form is not None}
                child.is_ready = len(self._forms) == len(found)
                return child.is_ready
        call = self._calls.get(child.number)
        if call is None:
            return child.is_dying  # of a call that was given up
        match message:
            case {"row": int(place), "verdict": [float(value) | int(value), problem, str(text)]} if place in call.left:
                if problem not in (None, *PROBLEMS) or not abs(value) <= LARGEST:
                    return False
                verdict = Verdict(float(value) if problem is None else 0.0, problem, printable(text))
                self._restart_clock_of_row(call)
                self._work.judge(call, place, verdict)
                return True
            case {"done": int(), "leftovers": bool(leftovers)} if not call.left:
                del self._calls[child.number]
                if leftovers and child.number in self._processes.children:
                    self._processes.kill(child)
                return True
        return False

    def _restart_clock_of_row(self, call: Call) -> None:
        form = self._forms[call.function]
        if form.kind != "batched" and not form.is_async:
            self._restart_clock(call)

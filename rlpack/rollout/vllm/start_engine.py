"""Start vLLM with the environment that it needs."""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import psutil
import torch

from rlpack.role_call import restart_call_clock
from rlpack.rollout.engine_meter import EngineMeter
from rlpack.rollout.errors import EngineDeadlineError, EngineError
from rlpack.rollout.vllm.deadlines import Deadline
from rlpack.rollout.vllm.end_with_rank import RANK_VARIABLE
from rlpack.rollout.vllm.engine_log import EngineLog
from rlpack.rollout.vllm.event_loop import EventLoop
from rlpack.rollout.vllm.process_variables import DEFAULT_VARIABLES, process_variables
from rlpack.rollout.vllm.vllm_package import installation_problem

# Time for the kernel to end a killed process.
_KILL_S = 10.0


class StartedEngine(NamedTuple):
    """A running engine.

    Attributes:
        front_end: a `vllm.v1.engine.async_llm.AsyncLLM`.
        log: what vLLM logs.
        processes: vLLM's processes.
        meter: gets vLLM's statistics of each iteration.
    """

    front_end: Any
    log: EngineLog
    processes: list[BaseProcess]
    meter: EngineMeter

    def death(self) -> str:
        """Return how vLLM's process ended, "" if it runs."""
        code = next((process.exitcode for process in self.processes if process.exitcode is not None), None)
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"vLLM's process {how}"

    def stop(self) -> None:
        """End the front end and vLLM's processes."""
        self.front_end.shutdown()
        kill(self.processes)


def start_engine(
    arguments: Mapping[str, Any], loop: EventLoop, *, deadline: Deadline, on_gpu: bool, deterministic: bool
) -> StartedEngine:
    """Start an engine.

    Args:
        arguments: the engine arguments.
        loop: where the front end's coroutines will run.
        deadline: deadline of the start; vLLM's own, which is longer, covers only its process.
        on_gpu: whether it runs on a GPU.
        deterministic: whether rounding must not depend on which rows run together.

    Raises:
        EngineError: vLLM is missing, doesn't fit, or did not start.
    """
    if problem := installation_problem(on_gpu=on_gpu):
        raise EngineError(f"rollout.engine=vllm: {problem}")
    for name, value in DEFAULT_VARIABLES.items():
        os.environ.setdefault(name, value)
    if on_gpu:  # vLLM would count memory that a trainer in this process has cached as used
        torch.cuda.empty_cache()
    log = EngineLog()
    variables = process_variables(
        num_threads=torch.get_num_threads(),
        on_gpu=on_gpu,
        enforce_eager=arguments["enforce_eager"],
        deterministic=deterministic,
    )
    variables |= {"VLLM_LOGGING_CONFIG_PATH": str(log.config), RANK_VARIABLE: str(os.getpid())}
    meter = EngineMeter()
    before = set(multiprocessing.active_children())
    try:
        with _environment(variables), log.standard_error():
            front_end = loop.run(_start(arguments, meter), deadline, "start")
    except EngineDeadlineError as error:
        kill(_new_processes(before))
        reason = log.last_words()
        said = f"it logged last: {reason}" if reason else "it logged nothing"
        raise EngineError(
            f"{error}; raise the key if it takes longer to load the model or to compile; {said}"
        ) from error
    except Exception as error:
        kill(_new_processes(before))
        raise EngineError(f"vLLM did not start: {log.explain(error)}") from error
    log.record()
    restart_call_clock()
    return StartedEngine(front_end, log, _new_processes(before), meter)


def kill(processes: Iterable[BaseProcess]) -> None:
    """End processes that didn't end when they were asked to, and those that they started, such as one for each GPU."""
    for process in processes:
        if process.is_alive():
            for own in _descendants(process):
                with suppress(psutil.NoSuchProcess):
                    own.kill()
            process.kill()
        process.join(_KILL_S)


def _descendants(process: BaseProcess) -> list[psutil.Process]:
    """Return all descendants of a process."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def _new_processes(before: set[BaseProcess]) -> list[BaseProcess]:
    """Return the running child processes that aren't in `before`."""
    return [process for process in multiprocessing.active_children() if process not in before]


async def _start(arguments: Mapping[str, Any], meter: EngineMeter) -> Any:
    """Make the front end inside the event loop, where its output handler runs."""
    from rlpack.rollout.vllm import library
    from rlpack.rollout.vllm.stat_logger import stat_logger

    engine_arguments = library.AsyncEngineArgs(**arguments)
    return library.AsyncLLM.from_engine_args(engine_arguments, stat_loggers=[stat_logger(meter)])


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that a new process inherits, and restore them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

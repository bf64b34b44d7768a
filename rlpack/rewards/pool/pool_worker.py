"""A worker process of the pool: load the functions, then answer calls until killed.

The supervisor (`rlpack.rewards.pool.supervisor`) starts the process and confines it first. The pool enforces deadlines
by killing it; only coroutines are timed out here, so that coroutines of other rows can continue.
"""

import os
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from pathlib import Path
from typing import Any, TypeVar

import rlpack
from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.limits import limit_cpu_time
from rlpack.rewards.reward_result import RewardResult, parse_reward, parse_rewards
from rlpack.rewards.signatures import NEVER_CALLED, RewardCallable, Signature, read_signature, resolve

_MAX_TEXT = 2000
_MAX_CAUSES = 20  # of one exception, whose chain may have a cycle
_REFUSED = (
    "; reward functions run in rlpack's sandbox: it hides credentials, the run's directory and other processes, and "
    "refuses writes outside $TMPDIR, more processes than reward.subprocesses and, with reward.sandbox=strict, the "
    "network; write below $TMPDIR, and set reward.subprocesses to start programs"
)
_MEMORY = "; a reward process may take reward.memory_gb of address space; use less memory, or raise reward.memory_gb"
_PRIVATE = (
    "; the working directory and HOME of reward functions are a private directory; build the paths of your files from "
    "__file__"
)
Columns = Mapping[str, Sequence[Any]]
_Error = TypeVar("_Error", bound=BaseException)


class LoadedFunction:
    """A function that is imported and ready to be called.

    Attributes:
        function: the function.
        signature: how it is called.
        arguments: keyword arguments of every call.
        timeout_s: deadline of a call.
    """

    def __init__(
        self, target: str, arguments: Mapping[str, Any], timeout_s: float, key: str, *, is_called: bool
    ) -> None:
        """Import the function; the parameters are those of `call_queue.FunctionSpec`."""
        self.function: RewardCallable = resolve(target, key)
        self.signature: Signature = read_signature(self.function, key) if is_called else NEVER_CALLED
        self.arguments = arguments
        self.timeout_s = timeout_s

    def call_batch(self, columns: Columns) -> Any:
        """Call a batched function with all rows."""
        values: dict[str, Any] = {**columns, "prompts": columns["prompt"], "completions": columns["completion"]}
        return self.function(**self._keywords(values))

    def call_row(self, columns: Columns, row: int) -> Any:
        """Call a function of one row."""
        values = {name: column[row] for name, column in columns.items()}
        if self.signature.kind == "verl":
            return self.function(**{**_verl_keywords(values, self.signature), **self.arguments})
        return self.function(**self._keywords(values))

    def _keywords(self, values: Mapping[str, Any]) -> dict[str, Any]:
        texts = {"prompt", "completion", "prompts", "completions"}
        columns = {name: value for name, value in values.items() if name not in texts}
        return {**columns, **{name: values[name] for name in self.signature.texts}, **self.arguments}


def _verl_keywords(values: Mapping[str, Any], signature: Signature) -> dict[str, Any]:
    """Return the arguments of verl's compute_score; the answer may be nested, as in verl's datasets."""
    model = values.get("reward_model")
    nested = model.get("ground_truth") if isinstance(model, dict) else None
    keywords = {name: value for name, value in values.items() if name in signature.columns}
    keywords["solution_str"] = values["completion"]
    truths = (values.get("ground_truth"), nested, values.get("answer"))
    keywords["ground_truth"] = next((truth for truth in truths if truth is not None), None)
    if "data_source" in values:
        keywords["data_source"] = values["data_source"]
    if "extra_info" in signature.columns or signature.takes_all:
        keywords["extra_info"] = values.get("extra_info")
    return keywords


def serve(channel: socket.socket, functions: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the functions, then answer calls until the channel closes."""
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    try:
        loaded = {name: LoadedFunction(**settings) for name, settings in functions.items()}
    except BaseException as error:  # noqa: BLE001 - importing a user's module can raise anything, SystemExit included
        is_named = isinstance(error, RewardError)  # by its key
        text = (
            f"{str(error)[:_MAX_TEXT]}{_hint(error)}"
            if is_named
            else f"a reward process failed to start: {_describe_error(error)}"
        )
        channel.sendall(wire.pack({"failed": text}))
        return
    signatures = {name: vars(function.signature) for name, function in loaded.items()}
    channel.sendall(wire.pack({"ready": signatures}))
    while (call := wire.receive(channel)) is not None:
        _answer(channel, loaded[call["function"]], call)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        channel.sendall(wire.pack({"done": call["id"], "leftovers": _has_children()}))


def _answer(channel: socket.socket, loaded: LoadedFunction, call: Mapping[str, Any]) -> None:
    """Call the function, sending each row's result once available."""
    columns, num_rows = call["columns"], call["rows"]
    is_batched, is_async = loaded.signature.kind == "batched", loaded.signature.is_async
    limit_cpu_time(2 * loaded.timeout_s * (1 if is_batched or is_async else num_rows))

    def send(row: int, result: RewardResult) -> None:
        fields = [result.value, result.problem, result.detail[:_MAX_TEXT]]
        channel.sendall(wire.pack({"id": call["id"], "row": row, "result": fields}))

    if is_batched:
        for row, result in enumerate(_score_batch(loaded, columns, num_rows)):
            send(row, result)
    elif is_async:
        _score_concurrently(loaded, columns, num_rows, send)
    else:
        for row in range(num_rows):
            send(row, _score_row(loaded, columns, row))


def _score_batch(loaded: LoadedFunction, columns: Columns, num_rows: int) -> list[RewardResult]:
    try:
        return parse_rewards(_await_if_needed(loaded.call_batch(columns)), num_rows)
    except BaseException as error:  # noqa: BLE001 - a user's function can raise anything, SystemExit included
        return [RewardResult(problem="error", detail=_describe_error(error))] * num_rows


def _score_row(loaded: LoadedFunction, columns: Columns, row: int) -> RewardResult:
    try:
        return _parse(loaded, _await_if_needed(loaded.call_row(columns, row)))
    except BaseException as error:  # noqa: BLE001 - as above
        return RewardResult(problem="error", detail=_describe_error(error))


def _score_concurrently(
    loaded: LoadedFunction, columns: Columns, num_rows: int, send: Callable[[int, RewardResult], None]
) -> None:
    """Await all rows concurrently, each for at most the function's deadline."""
    import asyncio  # costs every process 40 ms

    from rlpack.rewards.pool.shared_loop import run_until_complete

    async def score(row: int) -> None:
        limit = asyncio.timeout(loaded.timeout_s)
        try:
            async with limit:
                result = _parse(loaded, await loaded.call_row(columns, row))
        except BaseException as error:  # noqa: BLE001 - as above
            problem = "timeout" if limit.expired() else "error"
            result = RewardResult(problem=problem, detail=_describe_error(error))
        send(row, result)

    async def score_all() -> None:
        await asyncio.gather(*(score(row) for row in range(num_rows)))

    run_until_complete(score_all())


def _parse(loaded: LoadedFunction, reward: object) -> RewardResult:
    """Convert the return value of a function of one row.

    verl's functions may return a dict that contains `score`.
    """
    if loaded.signature.kind == "verl" and isinstance(reward, dict) and "score" in reward:
        reward = reward["score"]
    return parse_reward(reward)


def _await_if_needed(value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    if not isawaitable(value):
        return value
    from rlpack.rewards.pool.shared_loop import run_until_complete

    async def wait() -> Any:
        return await value

    return run_until_complete(wait())


def _has_children() -> bool:
    """Whether the function left child processes behind."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _describe_error(error: BaseException) -> str:
    """Describe an exception, with the last line in the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_in_rlpack(frame.filename)]
    own = [frame for frame in frames if "site-packages" not in frame.filename and not _is_in_stdlib(frame.filename)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    place += _hint(error)
    try:
        return f"{type(error).__name__}: {str(error)[:_MAX_TEXT]}{place}"
    except BaseException:  # noqa: BLE001 - an exception's __str__ is user code, too
        return f"{type(error).__name__}{place}"


def _hint(error: BaseException) -> str:
    """Return what to do about an exception that is most likely due to the sandbox, else ""."""
    if _cause(error, PermissionError) is not None:
        return _REFUSED
    if _cause(error, MemoryError) is not None:
        return _MEMORY
    missing = _cause(error, FileNotFoundError)
    return _PRIVATE if missing is not None and _is_looked_for_here(missing.filename) else ""


def _cause(error: BaseException | None, kind: type[_Error]) -> _Error | None:
    """Return an exception or the first of its causes that is of this kind, None if none is."""
    for _ in range(_MAX_CAUSES):
        if error is None or isinstance(error, kind):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_looked_for_here(name: object) -> bool:
    """Return whether a missing file is one of the working directory or of HOME, and no program such as `node`."""
    path = str(name or "")
    is_file = "/" in path or bool(os.path.splitext(path)[1])
    return path.startswith(f"{Path.home()}/") or (is_file and not os.path.isabs(path))


def _is_in_rlpack(file: str) -> bool:
    return Path(file).is_relative_to(Path(rlpack.__file__).parent)


def _is_in_stdlib(file: str) -> bool:
    return file.startswith("<") or Path(file).is_relative_to(sysconfig.get_path("stdlib"))

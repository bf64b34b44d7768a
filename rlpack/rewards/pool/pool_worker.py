"""What a process of the pool does: load the functions, then answer calls until it is ended.

It is called from `rlpack.rewards.pool.supervisor`, already confined. The pool enforces time limits by ending it. Only
coroutines are given up by itself, since those that wait beside them can go on.
"""

import os
import socket
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from pathlib import Path
from typing import Any

import rlpack
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.limits import allow_cpu
from rlpack.rewards.reward_result import Verdict, named, verdict_of, verdicts_of
from rlpack.rewards.signatures import Form, RewardFunction, form_of, resolve

_LONGEST_TEXT = 2000


class Loaded:
    """A function that can be called.

    Attributes:
        function: the function.
        form: how it is called.
        arguments: that it gets with every call.
        timeout_s: of a call.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any], timeout_s: float, key: str) -> None:
        self.function: RewardFunction = resolve(target, key)
        self.form: Form = form_of(self.function, key)
        self.arguments = arguments
        self.timeout_s = timeout_s

    def keywords(self, columns: Mapping[str, Sequence[Any]], row: int | None) -> dict[str, Any]:
        """Return what a call gets: all rows where `row` is None."""
        values = dict(columns) if row is None else {name: column[row] for name, column in columns.items()}
        texts = {"prompts": "prompt", "completions": "completion"} if row is None else {}
        if self.form.kind == "verl":
            return {**_verl_keywords(values, self.form), **self.arguments}
        given = {name: values.pop(texts.get(name, name)) for name in self.form.texts}
        values = {name: value for name, value in values.items() if name not in ("prompt", "completion")}
        return {**values, **given, **self.arguments}


def _verl_keywords(values: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """Return what verl's compute_score gets; the right answer may lie where verl's datasets have it."""
    model = values.get("reward_model")
    nested = model.get("ground_truth") if isinstance(model, dict) else None
    given = {name: value for name, value in values.items() if name in form.columns}
    given["solution_str"] = values["completion"]
    truths = (values.get("ground_truth"), nested, values.get("answer"))
    given["ground_truth"] = next((truth for truth in truths if truth is not None), None)
    if "data_source" in values:
        given["data_source"] = values["data_source"]
    if "extra_info" in form.columns or form.takes_all:
        given["extra_info"] = values.get("extra_info")
    return given


def serve(channel: socket.socket, functions: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the functions, say so on the channel, and answer calls until the other side is gone."""
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    try:
        loaded = {name: Loaded(**settings) for name, settings in functions.items()}
    except BaseException as error:  # noqa: BLE001 - a module that is imported may do anything, exit among it
        channel.sendall(wire.pack({"failed": _said(error)}))
        return
    forms = {name: vars(entry.form) for name, entry in loaded.items()}
    channel.sendall(wire.pack({"ready": forms}))
    while (call := wire.receive(channel)) is not None:
        _answer(channel, loaded[call["function"]], call)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        channel.sendall(wire.pack({"done": call["id"], "leftovers": _has_children()}))


def _answer(channel: socket.socket, loaded: Loaded, call: Mapping[str, Any]) -> None:
    """Call the function and send a verdict for each row as soon as it is there."""
    columns, rows = call["columns"], call["rows"]
    allow_cpu(2 * loaded.timeout_s * (1 if loaded.form.kind == "batched" or loaded.form.is_async else rows))

    def send(row: int, verdict: Verdict) -> None:
        text = verdict.text[:_LONGEST_TEXT]
        channel.sendall(wire.pack({"id": call["id"], "row": row, "verdict": [verdict.value, verdict.problem, text]}))

    if loaded.form.kind == "batched":
        for row, verdict in enumerate(_batched(loaded, columns, rows)):
            send(row, verdict)
    elif loaded.form.is_async:
        _concurrent(loaded, columns, rows, send)
    else:
        for row in range(rows):
            send(row, _single(loaded, columns, row))


def _batched(loaded: Loaded, columns: Mapping[str, Sequence[Any]], rows: int) -> list[Verdict]:
    try:
        rewards = loaded.function(**loaded.keywords(columns, None))
        if isawaitable(rewards):
            rewards = _awaited(rewards)
        return verdicts_of(rewards, rows)
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, SystemExit among it
        return [Verdict(problem="error", text=_said(error))] * rows


def _single(loaded: Loaded, columns: Mapping[str, Sequence[Any]], row: int) -> Verdict:
    try:
        reward = loaded.function(**loaded.keywords(columns, row))
        if isawaitable(reward):
            reward = _awaited(reward)
        return _worth(loaded, reward)
    except BaseException as error:  # noqa: BLE001 - as above
        return Verdict(problem="error", text=_said(error))


def _concurrent(loaded: Loaded, columns: Mapping[str, Sequence[Any]], rows: int, send: Any) -> None:
    """Await all rows at one time, each for at most the function's deadline."""
    import asyncio  # costs every process 40 ms

    async def one(row: int) -> None:
        limit = asyncio.timeout(loaded.timeout_s)
        try:
            async with limit:
                verdict = _worth(loaded, await loaded.function(**loaded.keywords(columns, row)))
        except BaseException as error:  # noqa: BLE001 - as above
            verdict = Verdict(problem="timeout" if limit.expired() else "error", text=_said(error))
        send(row, verdict)

    async def every() -> None:
        await asyncio.gather(*(one(row) for row in range(rows)))

    asyncio.run(every())


def _worth(loaded: Loaded, reward: object) -> Verdict:
    """Return the verdict of a function of one row; verl's may say more beside its score."""
    if loaded.form.kind == "verl" and isinstance(reward, dict) and "score" in reward:
        reward = reward["score"]
    return named(verdict_of(reward))


def _awaited(value: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _has_children() -> bool:
    """Whether the function left processes behind."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _said(error: BaseException) -> str:
    """Return an exception's type, text and place: the last line that is a user's own, not rlpack's, not a package's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_rlpacks(frame.filename)]
    own = [frame for frame in frames if "site-packages" not in frame.filename and not _is_pythons(frame.filename)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    try:
        return f"{type(error).__name__}: {str(error)[:_LONGEST_TEXT]}{place}"
    except BaseException:  # noqa: BLE001 - an exception's own text is a user's code, too
        return f"{type(error).__name__}{place}"


def _is_rlpacks(file: str) -> bool:
    return Path(file).is_relative_to(Path(rlpack.__file__).parent)


def _is_pythons(file: str) -> bool:
    return file.startswith("<") or Path(file).is_relative_to(sysconfig.get_path("stdlib"))

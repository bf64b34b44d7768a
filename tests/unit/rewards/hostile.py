"""Hostile reward functions: what user code may do to its host.

They are configured by name like any other, so only the pool's workers load them, never the tests.
"""

import ctypes
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


def fine(completion):
    return float(len(completion))


def sleeps(completion):
    time.sleep(3600)


def holds_the_lock(completion):
    ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps Python's lock


def loops(completion):
    while True:
        pass


def ignores_signals(completion):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda *_: None)
    while True:
        pass


def forks_for_ever(completion):
    while True:
        os.fork()


def forks_away(completion):
    """Leave orphans behind, outside the process group if possible."""
    for _ in range(4):
        child = os.fork()
        if child == 0:
            with suppress(OSError):
                os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        os.waitpid(child, 0)
    return 1.0


def allocates(completion):
    return float(len(bytearray(4 << 30)))


def prints(completion):
    for _ in range(1024):
        os.write(1, b"x" * (1 << 20))
    return 1.0


def exits(completion):
    sys.exit(3)


def exits_at_once(completion):
    os._exit(0)


def kills_itself(completion):
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_parent(completion):
    os.kill(os.getppid(), signal.SIGKILL)
    return 1.0


def raises(completion):
    raise KeyError(completion)


class Worse(BaseException):
    def __str__(self):
        raise self


def raises_worse(completion):
    raise Worse


def gives_none(completion):
    return None


def gives_text(completion):
    return "1"


def gives_too_few(completions):
    return [1.0] * (len(completions) - 1)


def gives_numpys(completion):
    import numpy

    return numpy.float32(0.5)


def gives_a_tensor_on_the_graph(completion):
    import torch

    return torch.ones((), requires_grad=True) * 2


def gives_nan(completion):
    return math.nan


def gives_infinity(completion):
    return math.inf


def gives_too_much(completion):
    return 1e308


def gives_a_boolean(completion):
    return True


def gives_a_dict(completion):
    return {"score": 1.0}


def changes_its_inputs(prompts, completions, answer):
    prompts.clear()
    completions.reverse()
    answer[:] = ["changed"] * 99
    return [1.0] * len(completions)


def reads_secrets(completion):
    """Return 1 if the secret is in the environment of this process or another one."""
    seen = [value for value in os.environ.values() if "hush" in value]
    for pid in (os.getpid(), *range(os.getppid() - 99, os.getppid() + 1)):
        with suppress(OSError):
            seen += [text for text in [Path(f"/proc/{pid}/environ").read_text()] if "hush" in text]
    return float(bool(seen))


def connects(completion):
    with socket.create_connection(("127.0.0.1", int(completion)), timeout=1.0):
        return 1.0


def writes_outside(completion):
    Path(completion).write_text("written")
    return 1.0


def writes_inside(completion):
    Path("note.txt").write_text("written")
    return float(Path.cwd().samefile(os.environ["TMPDIR"]))


def takes_an_expression_that_backtracks(completion):
    return float(bool(re.fullmatch(r"(a+)+b", "a" * 64)))


def leaves_a_thread(completion):
    def run():
        while True:
            pass

    threading.Thread(target=run, daemon=False).start()
    return 1.0


def leaves_a_process(completion):
    if os.fork() == 0:
        time.sleep(3600)
    return 1.0


def imports_what_is_not_there(completion):
    import no_such_package

    return no_such_package.score(completion)


async def _later():
    return 1.0


def gives_a_coroutine_in_a_list(completions):
    return [_later() for _ in completions]


def forgets_a_coroutine(completion):
    _later()


async def never_comes_back(completion):
    while completion == "hang":
        pass
    return 1.0


def writes_nonsense_to_the_pool(completion):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x00\x00\x00\x05hello")
        except OSError:
            continue
    return 1.0


def forges_a_result(completion):
    text = json.dumps({"row": 0, "result": [10**400, None, ""]}).encode()
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, len(text).to_bytes(4, "big") + text)
        except OSError:
            continue
    return 1.0


def shuts_every_socket(completion):
    for descriptor in range(3, 64):
        try:
            socket.socket(fileno=descriptor).shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
    return 1.0


def ends_by_a_real_time_signal(completion):
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def closes_everything(completion):
    os.closerange(0, 64)
    return 1.0

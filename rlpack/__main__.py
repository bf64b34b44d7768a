"""Run the command line as `python -m rlpack`.

Python then searches the working directory first. Its files must not replace installed packages, so it is removed from
the path. If Python has imported one of them by now in place of a standard module, it starts again without it (`-P`). A
file named `types.py` and the like ends Python before this module is reached.
"""

import os
import sys


def _shadowed() -> bool:
    """Return whether a file of the working directory was imported in place of a standard module."""
    modules = [module for name, module in sys.modules.items() if name in sys.stdlib_module_names]
    files = [vars(module).get("__file__") or "" for module in modules]
    return any(os.path.dirname(file.removesuffix(f"{os.sep}__init__.py")) == os.getcwd() for file in files)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        if _shadowed():
            os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])
        sys.path.append(sys.path.pop(0))
    from rlpack.cli.main import main

    sys.exit(main())

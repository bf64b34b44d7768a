"""Run the command line as `python -m rlpack`.

Run this way, Python searches the working directory first. Files there must not shadow installed packages, so the
directory is moved to the end of the path. If such a file has already been imported in place of a standard module,
Python is started again without the directory (`-P`). Some files, such as `types.py`, make Python exit before it reaches
this module.
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

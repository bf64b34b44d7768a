"""Run the command line as `python -m rlpack`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:  # files of the working directory must not replace installed packages
        sys.path.append(sys.path.pop(0))
    from rlpack.cli.main import main

    sys.exit(main())

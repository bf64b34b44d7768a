"""Run the command line as `python -m rlpack`."""

import sys

from rlpack.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

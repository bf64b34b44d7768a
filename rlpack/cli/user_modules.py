"""Make the modules in the working directory importable, where users keep their recipes, roles and rewards."""

import os
import sys

from rlpack.config.errors import ConfigError


def import_from_working_directory() -> None:
    """Append the working directory to the places that modules are imported from.

    Raises:
        ConfigError: it was deleted.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(["the working directory no longer exists; change to another one"]) from error
    if folder not in sys.path:
        sys.path.append(folder)

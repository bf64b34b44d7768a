"""The token of a Ray that a run starts for itself: one per run, in a file that only this user can read.

Ray's processes find the file by a variable in their environment. Ray by itself would make one token per user in the
home directory, which may not be writable, and leave its mode in the environment of the process that starts it.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpack.distributed.ray_internals import read_token_again

_MODE, _PATH, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
_TOKEN_BYTES = 32


class RunToken:
    """A token in a file in a private folder."""

    def __init__(self) -> None:
        """Write a new token.

        Raises:
            OSError: the folder for temporary files can't be written.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="rlpack-ray-"))  # mode 0700
        descriptor = os.open(self.folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(_TOKEN_BYTES))

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """Make Ray use the token for what is started in this block, and for this process until `remove`.

        A user who has turned authentication off (`RAY_AUTH_MODE=disabled`) gets none.
        """
        before = {name: os.environ.pop(name, None) for name in (_MODE, _PATH, TOKEN)}
        is_off = (before[_MODE] or "").lower() == "disabled"
        os.environ |= {_MODE: "disabled"} if is_off else {_MODE: "token", _PATH: str(self.folder / "token")}
        read_token_again()
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def remove(self) -> None:
        """Delete the token; this process uses that of its environment again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        read_token_again()

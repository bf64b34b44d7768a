"""How a run's last attempt ended: what `end.json` in its directory says, for the report and for other programs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from rlpack.observe.run_dir import END
from rlpack.safe_files import read_object
from rlpack.whole_files import write_whole

# Longest stored text of an error; the log has the rest.
_CHARACTERS = 2000
_Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunEnd:
    """The end of an attempt.

    Attributes:
        status: "finished"; "stopped" by a signal, such as Ctrl-C; or "failed".
        error: type and text of the error that ended it; empty unless it failed.
    """

    status: _Status
    error: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> "RunEnd":
        """Return the end of an attempt that an exception left, or that completed."""
        if error is None:
            return cls("finished")
        if not isinstance(error, Exception):
            return cls("stopped")
        return cls("failed", f"{type(error).__name__}: {error}"[:_CHARACTERS])

    def write(self, run_dir: Path) -> None:
        """Store it in a run directory.

        Raises:
            OSError: the file can't be written.
        """
        write_whole(run_dir / END, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> "RunEnd | None":
        """Return the stored end; None for a run in progress, one whose process was killed, or a damaged file."""
        try:
            stored = read_object(run_dir / END)
        except (OSError, ValueError):
            return None
        status = next((one for one in get_args(_Status) if one == stored.get("status")), None)
        return None if status is None else cls(status, str(stored.get("error", "")))

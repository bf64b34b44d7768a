"""What vLLM logs, in the rank and in its own process: a file, from which errors name their cause."""

import json
import logging
import re
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

_ERROR = re.compile(r"(?:^|\s)([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)): (\S.*)$")
_MOST_TEXT = 20_000  # characters of vLLM's log that go into the run's


class EngineLog:
    """A folder with vLLM's log; it lives as long as the engine.

    Attributes:
        path: the log, warnings and errors.
        config: the file that tells vLLM to write it (`VLLM_LOGGING_CONFIG_PATH`).
    """

    def __init__(self) -> None:
        """Write the configuration."""
        self._folder = tempfile.TemporaryDirectory(prefix="rlpack-vllm-log-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name) / "vllm.log"
        self.config = Path(self._folder.name) / "logging.json"
        self.path.touch()
        handler = {"class": "logging.FileHandler", "filename": str(self.path), "formatter": "plain"}
        settings = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
            "handlers": {"file": handler},
            "loggers": {"vllm": {"handlers": ["file"], "level": "WARNING", "propagate": False}},
        }
        self.config.write_text(json.dumps(settings), encoding="utf-8")

    def root_cause(self) -> str:
        """Return the first error that vLLM logged, with its type; "" if it logged none."""
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            if (match := _ERROR.search(line)) and " WARNING " not in line:
                return f"{match[1]}: {match[2]}"
        return ""

    def explain(self, error: BaseException) -> str:
        """Return the cause of an error of vLLM, and write vLLM's log into the run's."""
        text = self.path.read_text(encoding="utf-8", errors="replace")
        if text:
            _log.error("vLLM logged:\n%s", text[-_MOST_TEXT:].rstrip())
        return self.root_cause() or f"{type(error).__name__}: {error}"

"""Console logging of `rlpack train`: messages of the run's own code and all warnings, but no chatter from libraries."""

import logging
import os
from collections.abc import Mapping
from pathlib import PurePath

# Progress bars of libraries; set a variable to 0 to see them again.
QUIET: Mapping[str, str] = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' as well
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
# Libraries that rlpack itself imports, and whose messages are about their own work. Any other installed package may
# contain the user's code.
_LIBRARIES = {
    *("absl", "accelerate", "aiohttp", "bitsandbytes", "datasets", "filelock", "flash_attn", "fsspec", "httpcore"),
    *("httpx", "huggingface_hub", "hydra", "jax", "matplotlib", "numba", "numexpr", "omegaconf", "pandas", "peft"),
    *("PIL", "pyarrow", "ray", "requests", "safetensors", "tensorboard", "tensorflow", "tokenizers", "torch"),
    *("torchao", "transformers", "triton", "urllib3", "wandb", "yaml"),
}
_INSTALLED = {"site-packages", "dist-packages"}


def hide_progress_bars() -> None:
    """Hide the progress bars of libraries; libraries read these variables once, on import."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def log_to_console() -> None:
    """Log to standard error, if nothing is set up yet; records of libraries below warnings go only to `run.log`."""
    handler = logging.StreamHandler()
    handler.addFilter(concerns_the_run)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", handlers=[handler])


def concerns_the_run(record: logging.LogRecord) -> bool:
    """Return whether a record is a warning, or doesn't come from a library that rlpack uses."""
    return record.levelno >= logging.WARNING or _LIBRARIES.isdisjoint({record.name.partition(".")[0], _package(record)})


def _package(record: logging.LogRecord) -> str:
    """Return the installed package whose code logged a record, "" if it isn't installed."""
    parts = PurePath(record.pathname).parts
    places = [place for place, part in enumerate(parts[:-1]) if part in _INSTALLED]
    return PurePath(parts[places[-1] + 1]).stem if places else ""

"""Values of overrides in Hydra's grammar, and overrides as words of a shell command."""

import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def hydra_text(text: str) -> str:
    """Return text in Hydra's syntax, quoted if Hydra would otherwise read a number or an operator."""
    try:
        if OverridesParser.create().parse_override(f"key={text}").value() == text:
            return text
    except HydraException:
        pass
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def as_argument(key: str, text: str) -> str:
    """Return an override as a word of a shell command.

    >>> print(as_argument("run_dir", "runs/mine"), as_argument("run_dir", "My runs/1"))
    run_dir=runs/mine 'run_dir=My runs/1'
    """
    return shlex.quote(f"{key}={hydra_text(text)}")

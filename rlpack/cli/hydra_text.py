"""Values of overrides in Hydra's grammar."""

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

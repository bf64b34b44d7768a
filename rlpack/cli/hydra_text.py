"""Values of overrides in Hydra's grammar."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def hydra_text(text: str) -> str:
    """Return text as Hydra reads it, quoted where a number or an operator would be read otherwise."""
    try:
        if OverridesParser.create().parse_override(f"key={text}").value() == text:
            return text
    except HydraException:
        pass
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"

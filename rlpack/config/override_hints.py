"""Say how to write an override that Hydra's grammar refuses, or reads as several values."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlpack.config.keys import Key

_LONGEST_HINT = 200


def comma_problem(override: Override, key: Key | None) -> str:
    """Return the message for an override with several values, one for each run of a sweep, where there is no sweep.

    Args:
        override: it holds values with commas between them.
        key: its key, None for a config group.

    >>> from rlpack.config.keys import find
    >>> override = OverridesParser.create().parse_override("rollout.stop_token_ids=3,4")
    >>> comma_problem(override, find("rollout.stop_token_ids"))
    "rollout.stop_token_ids=3,4 has a comma; write 'rollout.stop_token_ids=[3,4]'"
    """
    text = override.input_line or ""
    name, _, value = text.partition("=")
    kind = "" if key is None else str(key.annotation)
    if kind.startswith("dict"):
        return f"{text} has a comma, but {name} has entries; set them one by one, as in {name}.<name>=<value>"
    if "tuple" in kind or "list" in kind:
        return f"{text} has a comma; write '{name}=[{value}]'"
    if "str" in kind and not {'"', "'", "\\"}.intersection(text):
        return f"{text} has a comma; write '{name}=\"{value}\"', or add --multirun for one run per value"
    return f"{text} has a comma, but {name} takes one value; add --multirun for one run per value"


def how_to_quote(text: str, parser: OverridesParser) -> str:
    """Return how to quote an override in a shell, or "" if quotes don't make it valid."""
    name, _, value = text.partition("=")
    if len(text) > _LONGEST_HINT or not text.isprintable() or {'"', "'", "\\"}.intersection(text):
        return ""
    if value[:1] == "[" and value[-1:] == "]":
        texts = value[1:-1].split(",")
        if any(text.count("[") != text.count("]") or text.count("{") != text.count("}") for text in texts):
            return ""  # a comma within a pattern
        items = ",".join(f'"{item.strip()}"' for item in texts)
        quoted, what = f"{name}=[{items}]", "the texts of a list"
    elif value[:1] in ("", "[", "{"):
        return ""
    else:
        quoted, what = f'{name}="{value}"', "its value"
    try:
        parser.parse_override(quoted)
    except HydraException:
        return ""
    return f"; quote {what}, in a shell as '{quoted}'"

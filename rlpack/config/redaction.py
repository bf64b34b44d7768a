"""Secrets in a config: one definition of which keys and values hold them.

The rules refuse configs with secrets; config.yaml, checkpoints and loggers hide them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "<hidden>"
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# `token` alone is a secret; pad_token, eos_token and max_tokens are not. Names with _env or _path only refer to one.
_SECRET = re.compile(
    r"^token$|(^|[_-])(secrets?|password|passwd|passphrase|credentials?|(api|access|private|secret)[_-]?key"
    r"|(access|api|auth|bearer|hf|hub|refresh|session)[_-]?token)$",
    re.IGNORECASE,
)
# A URL with a password, such as http://me:abc@proxy:3128, or a token in its place, whatever the name of its key.
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@|https?://[^/@\s]+@", re.IGNORECASE)


def looks_secret(name: str, value: Any) -> bool:
    """Return whether a key with this name and value holds a secret; empty values and booleans never do.

    >>> looks_secret("hub_token", "abc"), looks_secret("pad_token", "abc"), looks_secret("auth_token", True)
    (True, False, False)
    >>> looks_secret("proxy", "http://me:abc@proxy:3128"), looks_secret("proxy", "http://proxy:3128")
    (True, False)
    >>> looks_secret("pip", "git+https://abc@host/me"), looks_secret("pip", "git+ssh://git@host/me")
    (True, False)
    """
    if isinstance(value, str) and _URL_WITH_PASSWORD.search(value):
        return True
    holds_something = not isinstance(value, bool) and value not in (None, "", {}, [], ())
    return holds_something and _SECRET.search(_WORD_START.sub("_", name)) is not None


def secret_paths(place: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys below `place` that look like secrets, also inside lists.

    >>> list(secret_paths("reward.arguments", {"judges": [{"name": "a", "token": "abc"}]}))
    ['reward.arguments.judges.0.token']
    """
    for name, below in _entries(value):
        if looks_secret(name, below):
            yield f"{place}.{name}"
        else:
            yield from secret_paths(f"{place}.{name}", below)


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with secrets hidden.

    >>> without_secrets({"max_tokens": 8, "judges": [{"api_key": "abc"}]})
    {'max_tokens': 8, 'judges': [{'api_key': '<hidden>'}]}
    """
    return {name: _redacted(str(name), value) for name, value in config.items()}


def _redacted(name: str, value: Any) -> Any:
    """Return the value of a key, or of an item of its list, with the secrets in it hidden."""
    if looks_secret(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [_redacted(item, below) for item, below in _entries(value)] if _is_list(value) else value


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a mapping or a list by name; entries of a list are named by index."""
    if isinstance(value, Mapping):
        yield from ((str(name), below) for name, below in value.items())
    elif _is_list(value):
        yield from ((str(number), below) for number, below in enumerate(value))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)

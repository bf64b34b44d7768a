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
    r"^token$|(^|[_-])(secrets?|passwords?|passwd|passphrases?|credentials?|authorization"
    r"|(api|access|private|secret)[_-]?keys?|(access|api|auth|bearer|hf|hub|refresh|session)[_-]?tokens?)$",
    re.IGNORECASE,
)
# Names of text that is usually a secret: github_pat, db_pwd. Numbers and sections with such names are not.
_SECRET_TEXT = re.compile(r"^pat$|[_-](pat|pwd)$", re.IGNORECASE)
# A name that ends in key usually refers to a field, such as answer_key="solution": it is a secret if a provider's name
# comes before, or if the text looks random.
_KEY = re.compile(r"[_-]keys?$", re.IGNORECASE)
_KEY_OF_PROVIDER = re.compile(
    r"(^|[_-])(openai|anthropic|claude|wandb|hf|hub|hugging_?face|google|gemini|azure|mistral|cohere|groq|together"
    r"|open_?router|deep_?seek|fireworks|replicate|perplexity|xai|nvidia|ngc|dashscope|moonshot|aws|gcp|git_?hub"
    r"|git_?lab|auth|encryption|signing)[_-]keys?$",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"(?=\S*\d)[^\s/]{16,}")
# A URL with a password, such as http://me:abc@proxy:3128, or a token in its place, whatever the name of its key.
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@|https?://[^/@\s]+@", re.IGNORECASE)
# A URL whose query holds one, such as http://host/v1?api_key=abc.
_URL_WITH_KEY = re.compile(
    r"://\S*[?&]([\w.-]*[_.-])?(api_?key|key|token|secret|password|passwd|pwd|auth|signature|sig)=[^&#\s]",
    re.IGNORECASE,
)
# Keys and tokens that providers issue, by their prefixes, and the value of an authorization header. What
# follows a slash is part of a path; `sk-` also begins names of models and folders, which are words separated by dashes.
_ISSUED = re.compile(
    r"(?<![A-Za-z0-9/])(sk-(?:proj|svcacct|admin|or-v1|ant-[a-z0-9]+)-(?=[\w-]*\d)[\w-]{16,}"
    r"|sk-(?=[A-Za-z]*\d)[A-Za-z0-9]{16,}|hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|AKIA[A-Z0-9]{16}|Bearer +[\w.~+/=-]{16,})"
)


def looks_secret(name: str, value: Any) -> bool:
    """Return whether a key with this name and value holds a secret; empty values and booleans never do.

    >>> looks_secret("hub_token", "abc"), looks_secret("pad_token", "abc"), looks_secret("auth_token", True)
    (True, False, False)
    >>> looks_secret("openai_key", "abc"), looks_secret("answer_key", "abc"), looks_secret("sort_key", 3)
    (True, False, False)
    >>> looks_secret("proxy", "http://me:abc@proxy:3128"), looks_secret("proxy", "http://proxy:3128")
    (True, False)
    >>> looks_secret("pip", "git+https://abc@host/me"), looks_secret("pip", "git+ssh://git@host/me")
    (True, False)
    """
    if isinstance(value, str) and any(
        pattern.search(value) for pattern in (_URL_WITH_PASSWORD, _URL_WITH_KEY, _ISSUED)
    ):
        return True
    if isinstance(value, bool) or value in (None, "", {}, [], ()):
        return False
    words = _WORD_START.sub("_", name)
    if _SECRET.search(words) is not None:
        return True
    is_named = _SECRET_TEXT.search(words) is not None or _KEY_OF_PROVIDER.search(words) is not None
    if (is_named or (words.lower() == "tokens" and isinstance(value, Mapping))) and _is_text(value):
        return True
    return _KEY.search(words) is not None and any(_RANDOM.fullmatch(text) for text in _texts(value))


def _is_text(value: Any) -> bool:
    """Return whether a value is text, or a list or mapping of texts."""
    if isinstance(value, Mapping):
        return all(isinstance(below, str) for below in value.values())
    return isinstance(value, str) or (_is_list(value) and all(isinstance(item, str) for item in value))


def _texts(value: Any) -> list[str]:
    """Return a text, or the texts of a list or mapping of texts; [] for other values."""
    if not _is_text(value):
        return []
    return [value] if isinstance(value, str) else list(value.values() if isinstance(value, Mapping) else value)


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

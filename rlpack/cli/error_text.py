"""Error messages of commands: one line per problem, with long values shortened.

Errors echo what was given: a key's value, a line of a file, a column. All commands print errors here, so that a long
value never hides the key and the fix next to it.
"""

import re
import sys

from rlpack.observe.terminal import STANDARD_ERROR, discard
from rlpack.observe.text import shortened

_LONG_WORD = re.compile(r"\S{301,}")
_WORD, _LINE, _LINES = 160, 1200, 50


def print_error(command: str, message: str) -> None:
    """Print the error that ended `rlpack <command>`, shortened; a closed standard error is not a further error."""
    try:
        print(f"rlpack {command}: {concise(message)}", file=sys.stderr, flush=True)
    except OSError:
        discard(STANDARD_ERROR)


def concise(message: str) -> str:
    """Shorten long words, long lines and long lists of lines in a message; their beginnings and ends are kept.

    >>> concise("seed is '" + "9" * 50_000 + "'; it has to be a whole number").count("9")
    134
    """
    lines = message.encode("utf-8", "backslashreplace").decode().splitlines()  # not all text from a shell is Unicode
    kept = [shortened(_LONG_WORD.sub(lambda word: shortened(word[0], _WORD), line), _LINE) for line in lines[:_LINES]]
    return "\n".join([*kept, *([f"… and {len(lines) - _LINES} more lines"] if len(lines) > _LINES else [])])

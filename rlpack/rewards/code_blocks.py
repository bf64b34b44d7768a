"""The fenced code blocks of a response, as Markdown has them."""

import re
from collections.abc import Iterator

# The first fence of a line, with the indentation and the text before it, and the info string after it. The quantifiers
# are possessive, so a search takes time in proportion to the text.
_OPENING = re.compile(
    r"^(?P<indent>[ \t]*+)(?P<before>(?:(?!```)[^\n])*+)(?P<fence>`{3,}+)[ \t]*+(?P<tag>[^\s`]*+)(?P<rest>[^`\n]*+)\n",
    re.MULTILINE,
)
_PYTHON = re.compile(r"[{.]*(?:python|py)[\d.]*(?!\w)", re.IGNORECASE)


def program_of(completion: str) -> str:
    r"""Return the last block whose fence has the tag `python`, `python3` or `py`, or none; else the last block.

    Without a block, the program is the whole completion.

    >>> program_of("```bash\npip install x\n```\nThen:\n```python\nimport x\n```\nIt prints:\n```text\n1\n```")
    'import x\n'
    >>> program_of("import x")
    'import x'
    """
    blocks = list(_blocks(completion))
    programs = [text for tag, text in blocks if not tag or _PYTHON.match(tag)] or [text for _, text in blocks]
    return programs[-1] if programs else completion


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the tag and the text of each block that has a closing fence."""
    position = 0
    while opening := _OPENING.search(text, position):
        position = opening.end()
        if opening["before"] and opening["rest"].strip():  # a sentence about fences
            continue
        # A deeper fence, in a docstring for example, closes nothing; a fence may also follow the last line's code.
        closing = re.compile(
            rf"^(?:{opening['indent']})? {{0,3}}{opening['fence']}|(?<=[^\s`]){opening['fence']}[ \t]*+$", re.MULTILINE
        ).search(text, position)
        if closing is None:
            return
        yield opening["tag"], text[position : closing.start()]
        position = closing.end()

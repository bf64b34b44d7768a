"""The fenced code blocks of a response, as Markdown has them."""

import re
from collections.abc import Iterator
from itertools import islice

# A line with a fence: the text before the first one, and after it. The quantifiers are possessive, so a search takes
# time in proportion to the text.
_FENCED_LINE = re.compile(r"^(?P<before>(?:(?!```)[^\n])*+)(?P<fence>`{3,}+)(?P<after>[^\n]*+)", re.MULTILINE)
_INDENT = re.compile(r"^[ \t]*+(?=\S)", re.MULTILINE)
_PYTHON = re.compile(r"[{.]*(?:python|py)[\d.]*(?!\w)", re.IGNORECASE)


def program_of(completion: str) -> str:
    r"""Return the last block whose fence has the tag `python`, `python3` or `py`.

    If there is none, it is the last block without a tag, or else the last block: an untagged block after a tagged one
    is output. Without a block, the program is the whole completion, or the text before its only fence, since a prompt
    may end with the opening fence.

    >>> program_of("```bash\npip install x\n```\nThen:\n```python\nimport x\n```\nIt prints:\n```text\n1\n```")
    'import x\n'
    >>> program_of("import x"), program_of("import x\n```\nThis imports x.")
    ('import x', 'import x\n')
    """
    blocks = list(_blocks(completion))
    tagged = [text for tag, text in blocks if _is_python(tag)]
    programs = tagged or [text for tag, text in blocks if not tag] or [text for _, text in blocks]
    return programs[-1] if programs else _before_only_fence(completion)


def _before_only_fence(text: str) -> str:
    """Return the text before an untagged line that starts with the only fence; without one, all text."""
    lines = list(islice(_FENCED_LINE.finditer(text), 2))
    if len(lines) != 1 or lines[0]["before"] or lines[0]["after"].strip():
        return text
    program = text[: lines[0].start()]
    return program if program.strip() else text


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the tag and the text of each block that has a closing fence."""
    opening = None
    for line in _FENCED_LINE.finditer(text):
        if opening is None:
            opening = line if _opens(line) else None
        elif _starts_program(line, opening):
            opening = line
        elif _closes(line, opening):
            block = text[opening.end() + 1 : line.start() + len(line["before"].rstrip())]
            yield _tag(opening), _without_indent(block, len(opening["before"]))
            opening = None


def _without_indent(block: str, most: int) -> str:
    """Remove a list item's indentation, no more than `most` characters, from a block's lines.

    It is that of the first line, which a program doesn't indent. So lines of a text in quotes may have less.
    """
    first = _INDENT.search(block)
    indent = min(most, len(first[0])) if first else 0
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", block, flags=re.MULTILINE) if indent else block


def _opens(line: re.Match[str]) -> bool:
    """Whether a line outside blocks opens one; after text, which may be a sentence about fences, only with a tag."""
    if "`" in line["after"]:
        return False
    return not line["before"].strip() or _is_python(line["after"].strip(), whole=True)


def _starts_program(line: re.Match[str], opening: re.Match[str]) -> bool:
    """Whether a line in a block opens another: the block is a wrapper, a line of text, or has no closing fence.

    A fence in a program's docstring, which is deeper or shorter, opens nothing.
    """
    if line["before"].strip() or not _opens(line) or not _is_python(_tag(line)):
        return False
    tag = _tag(opening)
    return _is_fence_of(line, opening) or bool(tag and not _is_python(tag))


def _closes(line: re.Match[str], opening: re.Match[str]) -> bool:
    """Whether a line closes a block: it starts with the fence, or has the fence after the last line's code."""
    if line["before"].strip():
        return len(line["fence"]) >= len(opening["fence"]) and not line["after"].strip()
    return _is_fence_of(line, opening) and not _is_python(_tag(line))


def _is_fence_of(line: re.Match[str], opening: re.Match[str]) -> bool:
    """Whether a line that starts with a fence is at the level of a block: not shorter, and not deeper."""
    before = opening["before"]
    indent = before[: len(before) - len(before.lstrip(" \t"))]
    depth = line["before"].removeprefix(indent)
    return len(line["fence"]) >= len(opening["fence"]) and len(depth) <= 3 and not depth.strip(" ")


def _tag(line: re.Match[str]) -> str:
    return next(iter(line["after"].split(maxsplit=1)), "")


def _is_python(tag: str, whole: bool = False) -> bool:
    return bool(_PYTHON.fullmatch(tag) if whole else _PYTHON.match(tag))

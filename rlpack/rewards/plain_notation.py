"""Mathematics in the notation of programs, such as `2*pi` and `x**2`, as LaTeX."""

import re

_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
# A power has an operand on both sides; `**7**` is bold text.
_POWER = re.compile(r"(?<=[\w)\]}])\s*\*\*\s*(?=[-+(\w\\])")
_EXPONENT = re.compile(r"\^([-+]?(?:\d+(?:\.\d+)?|[A-Za-z](?!\w)))(?![\w.])")
_OPERATOR = re.compile(r"(?:\^|(?<![A-Za-z\\])sqrt)\s*\(")


def as_latex(text: str) -> str:
    r"""Return text with its powers, square roots and `pi` in LaTeX; `*` and `/` are the same there.

    >>> as_latex("2*pi"), as_latex("x**10 - sqrt((x + 1)/2)"), as_latex("2**(n + 1)"), as_latex("a pie")
    ('2*\\pi ', 'x^{10} - \\sqrt{(x + 1)/2}', '2^{n + 1}', 'a pie')
    """
    text = _EXPONENT.sub(r"^{\1}", _POWER.sub("^", _PI.sub(r"\\pi ", text)))
    for opening in reversed(list(_OPERATOR.finditer(text))):  # the innermost first
        end = _closing(text, opening.end())
        if end is not None:
            operator = "^" if opening[0].startswith("^") else r"\sqrt"
            text = f"{text[: opening.start()]}{operator}{{{text[opening.end() : end]}}}{text[end + 1 :]}"
    return text


def _closing(text: str, start: int) -> int | None:
    """Return the position of the parenthesis that closes one before `start`, None if nothing does."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None

"""Numbers as people write them, rewritten for `math-verify`, which reads `10~000` as 10 times 0 and `2 1/2` as 1."""

import re

_SPACE = r"(?:[ ~\u00a0\u2009\u202f]|\\[,;: ])"
# The expressions below look at few characters around each digit, so a search takes time in proportion to the text.
_START = r"(?<![\w.,^])(?<!\d[ ~])"
_THOUSANDS = re.compile(rf"{_START}[1-9]\d{{0,2}}(?P<space>{_SPACE})\d{{3}}(?:(?P=space)\d{{3}})*+(?!(?P=space)?\d)")
_MIXED = re.compile(rf"{_START}(?<!/)(?<!/ )([1-9]\d{{0,8}}){_SPACE}([1-9]\d{{0,8}})/([1-9]\d{{0,8}})(?![\w/]|[.,]\d)")
_SIGN_BEFORE_CURRENCY = re.compile(r"(?<![\w)\]}$%.-])(?<![\d)\]}$%] )-(\\?\$|[€£¥₹])(?=\.?\d)")
_AFTER_HASHES = re.compile(r"(?<=#)(?=[-+$€£¥₹\\]*\.?\d)")
_FULL_STOP = re.compile(r"(?<=\d)\.(?=\s*\})")


def normalized(text: str) -> str:
    r"""Return text whose numbers have no spaces: `10\,000` is 10000, and `2 1/2` is 5/2; minus signs are ASCII.

    Between `#` and a number comes a space, without which `math-verify` doesn't see the number.

    >>> normalized(r"10\,000 - 2 1/2"), normalized("\u22125, or -$5"), normalized(r"\boxed{42.}"), normalized("####8")
    ('10000 - 5/2', '-5, or $-5', '\\boxed{42}', '#### 8')
    """
    text = _AFTER_HASHES.sub(" ", text.replace("\N{MINUS SIGN}", "-"))
    text = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), _MIXED.sub(_improper_fraction, text))
    return _FULL_STOP.sub("", _SIGN_BEFORE_CURRENCY.sub(r"\1-", text))


def _improper_fraction(number: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, number.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else number[0]

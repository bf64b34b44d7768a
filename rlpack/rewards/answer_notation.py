"""Numbers as people write them, rewritten for `math-verify`, which reads `10~000` as 10 times 0 and `2 1/2` as 1."""

import re
from decimal import Decimal

_SPACE = r"(?:[ ~\u00a0\u2009\u202f]|\\[,;: ])"
# The expressions below look at few characters around each digit, so a search takes time in proportion to the text.
_START = r"(?<![\w.,^])(?<!\d[ ~])"
_THOUSANDS = re.compile(rf"{_START}[1-9]\d{{0,2}}(?P<space>{_SPACE})\d{{3}}(?:(?P=space)\d{{3}})*+(?!(?P=space)?\d)")
_MIXED = re.compile(rf"{_START}(?<!/)(?<!/ )([1-9]\d{{0,8}}){_SPACE}([1-9]\d{{0,8}})/([1-9]\d{{0,8}})(?![\w/]|[.,]\d)")
_SIGN_BEFORE_CURRENCY = re.compile(r"(?<![\w)\]}$%.-])(?<![\d)\]}$%] )-(\\?\$|[€£¥₹])(?=\.?\d)")
_NUMBER = r"[-+]?(?:\\{0,2}[$€£¥₹])?[-+]?\.?\d"
# Characters after which the library doesn't see a number: signs, quotes, a bracket around a number alone, a star of
# italics, and the characters of East Asian text. `3:4` is a ratio, and `by (2)` a reference.
_BEFORE_NUMBER = re.compile(
    r"(?:(?<=[#>\"`≈≅→⇒“‘«\u3000-\u303f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uffef])|(?<=[^\d:]:)|(?<=\s\*))"
    rf"(?<!\\.)(?=(?:\*\*)?{_NUMBER})"
    rf"|(?:(?<=[:=]\s[(\[])|(?<=\bis\s[(\[])|(?<=^[(\[]))(?={_NUMBER}(?:\d|,\d{{3}}(?!\d)|[./]\d)*+[)\]](?!\s*[-+*/^÷×]))",
    re.MULTILINE,
)
# As Python prints a float, or a number with a decimal point or an exponent without a sign: `2e-5` is 2e - 5.
_FLOAT = re.compile(
    r"(?<![\w\\.])(?:(?:\d++\.\d*+|\.\d++)[eE][-+]?|\d++[eE][-+](?=\d\d)|\d++[eE])(?P<exponent>\d{1,2})(?!\w|\.\d)"
)
_LARGEST_EXPONENT = 40
_FULL_STOP = re.compile(r"(?<=\d)\.(?=\s*\})")


def normalized(text: str) -> str:
    r"""Return text whose numbers have no spaces: `10\,000` is 10000, and `2 1/2` is 5/2; minus signs are ASCII.

    A number in scientific notation, such as `1.5e-5`, is 0.000015. Between a number and a sign after which
    `math-verify` doesn't see it, such as `#` or a colon, comes a space.

    >>> normalized(r"10\,000 - 2 1/2"), normalized("\u22125, or -$5"), normalized(r"\boxed{42.}"), normalized("####8")
    ('10000 - 5/2', '-5, or $-5', '\\boxed{42}', '#### 8')
    >>> normalized("**Answer:**34"), normalized("(3+4)*2 is (14)"), normalized("1.5e-5"), normalized("2*e5")
    ('**Answer: **34', '(3+4)*2 is ( 14)', '0.000015', '2*e5')
    """
    text = _FLOAT.sub(_decimal, text.replace("\N{MINUS SIGN}", "-"))
    text = _BEFORE_NUMBER.sub(" ", text)
    text = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), _MIXED.sub(_improper_fraction, text))
    return _FULL_STOP.sub("", _SIGN_BEFORE_CURRENCY.sub(r"\1-", text))


def _decimal(number: re.Match[str]) -> str:
    return format(Decimal(number[0]), "f") if int(number["exponent"]) <= _LARGEST_EXPONENT else number[0]


def _improper_fraction(number: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, number.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else number[0]

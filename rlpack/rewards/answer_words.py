"""Words in final answers, which `math-verify` reads as products of letters or leaves out.

The library reads `ABC` as `BAC`, 18 dollars as a product, and 2 pm as 2 am.
"""

import re

from rlpack.rewards.answer_part import boxes

_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}\\]*)\}")
_LETTERS = re.compile(r"[A-Za-z]+(?:\s+[A-Za-z]+)*")
# Words that have a meaning in mathematics: these answers are left to the library.
_MATHEMATICAL = re.compile(r"\b(?:and|or|inf|infinity|infty)\b", re.IGNORECASE)
# Two or three letters in lower case are a product, except these words, most of which are anagrams of each other.
_PRODUCT = re.compile(r"(?:[a-z]\s*){2,3}")
_SHORT_WORD = re.compile(
    r"no|on|is|si|it|in|at|up|to|so|yes|not|ton|one|two|tow|six|ten|net|red|cat|act|dog|god|now|own|won|was|saw|who|how"
    r"|eat|tea|ate|pot|top|tip|pit|man|men|boy|day|pi|ip"
)
_LABEL = re.compile(r"\(?([A-Za-z])\s*[.:)]\s*[^\s(]")
_TIME = re.compile(r"\d[\d:.]*\s*([ap])\.?\s*m\b\.?", re.IGNORECASE)
_QUANTITY = re.compile(
    r"(?P<sign>-?)(?P<currency>[€£¥₹]|\\?\$)?\s*(?P<number>-?(?:\d[\d,]*+(?:\.\d+|/\d+)?|\.\d+))"
    r"\s*(?P<currency_after>[€£¥₹])?(?:\s+(?P<unit>[A-Za-z]{4,}(?: [A-Za-z]{2,}){0,2})\.?)?"
)
# Singular units, and plurals without an s. Other units are plural: a singular may be a numeral or a direction, as in
# `3 fourth`, `5 grand` and `5 degrees below`.
_UNIT = re.compile(
    r"(?:dollar|cent|penny|pence|euro|pound|rupee|inch|foot|feet|yard|mile|(?:centi|milli|kilo)?(?:meter|metre|gram)"
    r"|(?:milli)?(?:liter|litre)|ounce|pint|quart|gallon|acre|second|minute|hour|week|month|year|degree|unit|person"
    r"|people|children|women|teeth|geese|mice|fish|sheep|oxen)"
)
_PLURAL = re.compile(r"\w{2,}s(?<!ss)(?<!us)(?<!is)")
# A noun alone, its dimension, or what it is counted by.
_UNIT_PHRASE = re.compile(
    r"(?:square |cubic )?(?P<noun>[a-z]+)(?: (?:per [a-z]{2,}|each|total|in total|altogether|celsius|fahrenheit))?"
)
_DIMENSION = re.compile(r"(?:square|cubic) ")
# Plural words, and words after "per", that change the number.
_CHANGES_NUMBER = re.compile(
    r"\b(?:arc(?:sin|cos|tan)s?|sins|sines|cosines|tangents|logs|roots|squares|cubes|powers|factorials|multiples"
    r"|reciprocals|inverses|zero(?:e?s)?|ones?|twos?|threes?|fours?|fives?|six(?:es)?|sevens?|eights?|nines?|tens?"
    r"|elevens?|twel(?:fth|ve)s?|\w+teens?|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ies)|dozens?|scores?"
    r"|hundreds?|thousands?|myriads?|lakhs?|crores?|grands?|\w*[bmtr]illions?"
    r"|googols?|mille?|hal(?:f|fs|ves)|thirds?|quarters?|(?!months?|widths?|depths?|lengths?)\w{2,}ths?|parts|fractions"
    r"|decimals|repeats|pairs?|couples?|trios|doubles|triples|folds?|\w*percent\w*|negatives|minuses|pluses|times|bases"
    r"|infinit\w+|perhaps|besides|unless)\b"
)


def letters_of(answer: str) -> str | None:
    r"""Return an answer of two or more letters in lower case, without spaces; None for other answers.

    Two or three letters in lower case, outside `\text`, are a product, unless they are a common word such as "no".

    >>> letters_of(r"\text{No solution}."), letters_of("HHT"), letters_of("x"), letters_of("2x"), letters_of("x or y")
    ('nosolution', 'hht', None, None, None)
    >>> letters_of("no"), letters_of("xy"), letters_of(r"\text{xy}")
    ('no', None, 'xy')
    """
    return None if _is_product(answer) else _all_letters(answer)


def _is_product(answer: str) -> bool:
    letters = answer.strip().strip("$").strip().removesuffix(".")
    return _PRODUCT.fullmatch(letters) is not None and not _SHORT_WORD.fullmatch("".join(letters.split()))


def _all_letters(answer: str) -> str | None:
    text = _without_commands(answer).removesuffix(".")
    if len(text) < 2 or not _LETTERS.fullmatch(text) or _MATHEMATICAL.search(text):
        return None
    return "".join(text.split()).lower()


def quantity(answer: str) -> tuple[str, str] | None:
    """Return the number and the unit of an amount with a currency sign or with a unit; None for other answers.

    A unit is a known one, or a plural, perhaps with "square", "per day" or "each", but no numeral. Other words aren't
    recognized, so `36 red balls` isn't 36: words that change a number are too many to be listed.

    >>> quantity("36 eggs"), quantity("€18"), quantity("5 million"), quantity("5 degrees below"), quantity("36")
    (('36', 'egg'), ('18', ''), None, None, None)
    """
    match = _QUANTITY.fullmatch(answer.strip())
    if match is None or not (match["unit"] or match["currency"] or match["currency_after"]):
        return None
    unit = (match["unit"] or "").lower()
    if (unit and not _is_unit(unit)) or (match["sign"] and match["number"].startswith("-")):
        return None
    return match["sign"] + match["number"], unit.removesuffix("s").replace("tre", "ter")


def _is_unit(words: str) -> bool:
    phrase = _UNIT_PHRASE.fullmatch(words)
    if phrase is None or _CHANGES_NUMBER.search(words):
        return False
    if _UNIT.fullmatch(phrase["noun"]):
        return True
    is_product = list(phrase["noun"]) == sorted(set(phrase["noun"]))  # letters in alphabetical order, as in `5 abcs`
    return not is_product and _PLURAL.fullmatch(phrase["noun"]) is not None


def differ(said: str, answer: str) -> bool:
    """Whether two answers, which may have the same numbers, differ in letters, option label, half of day or unit.

    >>> differ("BAC", "ABC"), differ("A. 5", "B. 5"), differ("2 pm", "2 am"), differ("36 eggs", "36 hens")
    (True, True, True, True)
    >>> differ("5 units", "5 square units"), differ("36 inches", "36 square inches"), differ("5 units", "5 feet")
    (False, False, False)
    >>> differ("xy", "yx"), differ("2 pm", "2"), differ("36 eggs", "36")
    (False, False, False)
    """
    amounts = [amount for amount in (quantity(said), quantity(answer)) if amount]
    # An unnamed unit fits any other; so does the dimension, which answers often leave out.
    units = sorted({_DIMENSION.sub("", unit) for _, unit in amounts} - {"", "unit"})
    if len(units) == 2 and not units[1].startswith(units[0]):  # one may be shortened
        return True
    # A product is compared with a word as text.
    letters = set() if _is_product(said) and _is_product(answer) else {_all_letters(said), _all_letters(answer)}
    said, answer = _without_commands(said), _without_commands(answer)
    labels = {match[1].lower() for match in (_LABEL.match(said), _LABEL.match(answer)) if match}
    halves = {match[1].lower() for match in (_TIME.fullmatch(said), _TIME.fullmatch(answer)) if match}
    return (len(letters) == 2 and None not in letters) or any(len(words) == 2 for words in (labels, halves))


def boxed(text: str) -> str | None:
    r"""Return the content of the only box in text, None if there is none or several.

    >>> boxed(r"So \boxed{\frac{1}{2}}."), boxed(r"\boxed{1} or \boxed{2}"), boxed("1")
    ('\\frac{1}{2}', None, None)
    """
    found = boxes(text)
    if len(found) != 1:
        return None
    _, start, end = found[0]
    return text[start:end] if end < len(text) else None


def _without_commands(answer: str) -> str:
    return _TEXT_COMMAND.sub(r"\1", answer).strip().strip("$").strip()

"""Words in final answers, which `math-verify` reads as products of letters or leaves out.

The library reads `ABC` as `BAC`, 18 dollars as a product, and 2 pm as 2 am.
"""

import re
from itertools import islice

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}\\]*)\}")
_LETTERS = re.compile(r"[A-Za-z]+(?:\s+[A-Za-z]+)*")
# Words that have a meaning in mathematics: these answers are left to the library.
_MATHEMATICAL = re.compile(r"\b(?:and|or|inf|infinity|infty)\b", re.IGNORECASE)
_LABEL = re.compile(r"\(?([A-Za-z])\s*[.:)]\s*[^\s(]")
_TIME = re.compile(r"\d[\d:.]*\s*([ap])\.?\s*m\b\.?", re.IGNORECASE)
_QUANTITY = re.compile(
    r"(?P<sign>-?)(?P<currency>[€£¥₹]|\\?\$)?\s*(?P<number>-?(?:\d[\d,]*+(?:\.\d+|/\d+)?|\.\d+))"
    r"\s*(?P<currency_after>[€£¥₹])?(?:\s+(?P<unit>[A-Za-z]{4,}(?: [A-Za-z]{2,}){0,2})\.?)?"
)
# Words after a number that aren't its unit, but change it.
_CHANGES_NUMBER = re.compile(
    r"\b(?:alpha|beta|gamma|delta|epsilon|zeta|theta|iota|kappa|lambda|sigma|omega|sqrt|sinh?|cosh?|tanh?|arc\w+|ln|log|pi"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w*teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|point|dozens?|hundreds?|score"
    r"|thousands?|\w*[bmtr]illions?|hal(?:f|ves)|thirds?|quarters?|pairs?|couples?|gross|\w*[fhnx]ths?|\w*percent\w*"
    r"|plus|minus|times|over|divided|squared|cubed|factorial|mod|modulo|base|binary|choose|to|and|or|not|wrong|less|more"
    r"|fewer|than|remainder|infinity|through|until|except|without|power|negative)\b",
    re.IGNORECASE,
)


def letters_of(answer: str) -> str | None:
    r"""Return an answer of two or more letters in lower case, without spaces; None for other answers.

    >>> letters_of(r"\text{No solution}."), letters_of("HHT"), letters_of("x"), letters_of("2x"), letters_of("x or y")
    ('nosolution', 'hht', None, None, None)
    """
    text = _without_commands(answer).removesuffix(".")
    if len(text) < 2 or not _LETTERS.fullmatch(text) or _MATHEMATICAL.search(text):
        return None
    return "".join(text.split()).lower()


def quantity(answer: str) -> tuple[str, str] | None:
    """Return the number and the unit of an amount with a currency sign or with words; None for other answers.

    >>> quantity("36 eggs"), quantity("€18"), quantity("5 million"), quantity("5 xy"), quantity("36")
    (('36', 'egg'), ('18', ''), None, None, None)
    """
    match = _QUANTITY.fullmatch(answer.strip())
    if match is None or not (match["unit"] or match["currency"] or match["currency_after"]):
        return None
    unit = (match["unit"] or "").lower()
    first_word = list(unit.partition(" ")[0])
    is_product = bool(unit) and first_word == sorted(set(first_word))  # letters in alphabetical order, as in `5 abcd`
    if is_product or _CHANGES_NUMBER.search(unit) or (match["sign"] and match["number"].startswith("-")):
        return None
    return match["sign"] + match["number"], unit.removesuffix("s").replace("tre", "ter")


def differ(said: str, answer: str) -> bool:
    """Whether two answers, which may have the same numbers, differ in letters, option label, half of day or unit.

    >>> differ("BAC", "ABC"), differ("A. 5", "B. 5"), differ("2 pm", "2 am"), differ("36 eggs", "36 hens")
    (True, True, True, True)
    >>> differ("abc", "ABC"), differ("2 pm", "2"), differ("36 eggs", "36")
    (False, False, False)
    """
    units = sorted({amount[1] for amount in (quantity(said), quantity(answer)) if amount and amount[1]})
    if len(units) == 2 and not units[1].startswith(units[0]):  # one may be shortened
        return True
    said, answer = _without_commands(said), _without_commands(answer)
    letters = {letters_of(said), letters_of(answer)}
    labels = {match[1].lower() for match in (_LABEL.match(said), _LABEL.match(answer)) if match}
    halves = {match[1].lower() for match in (_TIME.fullmatch(said), _TIME.fullmatch(answer)) if match}
    return (len(letters) == 2 and None not in letters) or any(len(words) == 2 for words in (labels, halves))


def boxed(text: str) -> str | None:
    r"""Return the content of the only box in text, None if there is none or several.

    >>> boxed(r"So \boxed{\frac{1}{2}}."), boxed(r"\boxed{1} or \boxed{2}"), boxed("1")
    ('\\frac{1}{2}', None, None)
    """
    boxes = list(islice(_BOX.finditer(text), 2))
    if len(boxes) != 1:
        return None
    start, depth = boxes[0].end(), 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return None


def _without_commands(answer: str) -> str:
    return _TEXT_COMMAND.sub(r"\1", answer).strip().strip("$").strip()

"""Mathematical answers, compared by value (`math-verify`, the extra `math`).

The library's own time limits are off: they use signals, which fail outside the main thread and can't interrupt C code.
The pool kills a row at `reward.timeout_s`, whatever sympy is doing.
"""

import logging
import math
import os
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, cast

from rlpack.installation import how_to_install
from rlpack.rewards.answer_notation import normalized
from rlpack.rewards.answer_part import answer_part
from rlpack.rewards.answer_words import boxed, differ, letters_of, quantity
from rlpack.rewards.errors import RewardError
from rlpack.rewards.plain_notation import as_latex

try:
    from math_verify import parse, verify
    from sympy import (
        Abs,
        Add,
        Basic,
        Equality,
        Expr,
        Float,
        Integer,
        MatrixBase,
        Mul,
        Number,
        NumberSymbol,
        Pow,
        Rational,
        Symbol,
        UnevaluatedExpr,
        binomial,
        ceiling,
        exp,
        expand,
        factorial,
        floor,
        log,
        nsimplify,
        preorder_traversal,
        radsimp,
    )
    from sympy.concrete.expr_with_limits import ExprWithLimits
    from sympy.core.function import AppliedUndef
    from sympy.core.numbers import ImaginaryUnit
    from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction
except ImportError as error:
    raise RewardError(
        f"rlpack.rewards.math needs math-verify, which is not installed; {how_to_install('math', os.environ)}"
    ) from error

logger = logging.getLogger(__name__)

# Numbers of more bits aren't computed: they would take long, and Python prints no more than 4,300 digits.
_MOST_BITS = 1 << 13
# Functions whose values are about as large as their arguments, or smaller.
_SMALL_FUNCTIONS = (Add, Mul, Abs, InverseTrigonometricFunction, TrigonometricFunction, ceiling, floor, log)
# Expressions of these alone are computed.
_COMPUTED = (*_SMALL_FUNCTIONS, Number, NumberSymbol, ImaginaryUnit, Symbol, Pow, exp, factorial, binomial)
_PERCENT = UnevaluatedExpr(Rational(1, 100))  # as the library has it
_MOST_BITS_OF_ROOT = 256  # sympy looks for the number's factors
_MOST_BITS_OF_DEGREE = 12  # of an exponent that isn't an integer
_MOST_TERMS = 32  # of numbers that are multiplied out
# Numbers that are equal in six decimal places may differ by this share of the larger one; others only by rounding.
_SMALL_SHARE, _ROUNDING = 5e-4, 1e-12
_LATEX_MARK = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")  # `\$` is a dollar sign
_PERCENTAGE = re.compile(r"([-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+|\d*\s*\\[dt]?frac\s*\{?\d+\}?\s*\{?\d+\}?))\s*\\?%")
_DOLLAR_SIGN = re.compile(r"(?<!\\)\\+\$")


def equivalent(completion: str, answer: object) -> float | None:
    r"""Return 1 if the final answer is equivalent to the dataset's, else 0.

    Rows without an answer, or whose answer can't be parsed as mathematics, get None.

    >>> equivalent(r"So it is $\\frac{2}{4}$.", "0.5"), equivalent(r"\\boxed{x + 1}", "x + 2")
    (1.0, 0.0)

    Args:
        completion: the policy's response; its answer is boxed, in LaTeX, or the last number of the part that holds it
            (`answer_part`): what follows the thinking, in `<answer>`, or after `####`.
        answer: a number, or an expression as text, in LaTeX or in the notation of programs (`2*pi`, `x**2`, `sqrt(2)`),
            which boxed answers may have, too. 50 % is equivalent to 50 and to 0.5. A solution that ends with its answer
            is read like a response.
    """
    completion = answer_part(completion)
    # Read even if there is no answer: a row that has a reward, by another function perhaps, is read again for majority
    # votes, outside the pool. A response that can't be read in time has to fail here.
    found = _parse_response(completion)
    written = "" if answer is None else answer_part(str(answer))
    expected = _parse_answer(written) if written else ()
    if not expected:
        return None
    # Outside a box, the library may have removed words of both as units.
    unit_free = str(expected[-1]) if boxed(completion) is None else written
    if differ(_as_written(completion, found), _as_written(written, [unit_free])):
        return 0.0
    return float(any(_is_equal(one, other) for one in expected for other in found))


def _is_equal(expected: Any, found: Any) -> bool:
    """Whether two readings of answers are equal.

    The library rounds decimal numbers to six places: small ones that differ are equal, and a large one may differ from
    itself by rounding. Here their difference is also compared with the larger one.
    """
    numbers = [_number(one) for one in (expected, found)]
    known = [number for number in numbers if number is not None]
    is_equal = verify([expected], [found], timeout_seconds=None)
    if len(known) < len(numbers):
        return is_equal
    difference, larger = abs(known[0] - known[1]), max(map(abs, known))
    if is_equal:
        return difference <= (_SMALL_SHARE * larger if all(known) else _ROUNDING)
    return (expected.has(Float) or found.has(Float)) and difference <= _ROUNDING * larger


def _number(answer: Any) -> float | None:
    """Return the value of a real number that takes little time to compute, None for other answers."""
    try:
        value = _without_symbol(answer)
        if isinstance(value, Expr) and value.is_number and _num_bits(value) <= _MOST_BITS:
            number = float(value.evalf())
            return number if math.isfinite(number) else None
    except Exception:  # sympy's errors have no common class; complex numbers have no order
        logger.debug("the value of %.200r can't be computed", answer, exc_info=True)
    return None


def final_answer_text(completion: str) -> str | None:
    r"""Return the final answer of a completion as text, None if there is none.

    Numbers are computed, and their roots reduced; decimal numbers become fractions; `x = 5` and 5 % are 5.
    An answer whose value has thousands of digits, such as $9^{9^9}$, is returned as it is written. So this takes little
    more time than `equivalent` does, if that returned a number or None.

    >>> final_answer_text(r"So it is $\\frac{2}{4}$."), final_answer_text("It is 0.5."), final_answer_text("It is not.")
    ('1/2', '1/2', None)
    >>> final_answer_text(r"\\boxed{x = \\frac{1}{\\sqrt 2}}"), final_answer_text(r"\\boxed{2^{10}}")
    ('sqrt(2)/2', '1024')
    >>> final_answer_text(r"\\boxed{0.5^{1000000000}}")
    '0.5^{1000000000}'
    """
    completion = answer_part(completion)
    parsed = _parse_response(completion)
    if not parsed:
        return None
    if letters := letters_of(_as_written(completion, parsed)):
        return letters
    answer = _without_symbol(parsed[0])
    try:
        if _num_bits(answer) <= _MOST_BITS:
            return str(_simplified(answer) if isinstance(answer, Expr) else answer)
    except Exception:  # sympy's errors have no common class
        logger.debug("the final answer can't be simplified: %.200r", parsed[-1], exc_info=True)
    return parsed[-1] if isinstance(parsed[-1], str) else None


def _without_symbol(answer: Any) -> Any:
    """Return the right side of an equation whose left side is a symbol or a function; other answers as they are."""
    match answer:
        case Equality(lhs=Symbol() | AppliedUndef() as left, rhs=Expr() as value) if not value.has(left):
            return value
    return answer


def _simplified(answer: Expr) -> Expr:
    """Return a form that many equal expressions share, of one whose numbers have few bits."""
    fractions = {number: nsimplify(number, rational=True) for number in answer.atoms(Float)}
    value = cast(Expr, answer.xreplace({_PERCENT: Integer(1), **fractions}))
    if not all(map(_is_cheap, preorder_traversal(value))):
        return value
    value = cast(Expr, value.doit())
    if value.free_symbols or _num_terms(value) > _MOST_TERMS or _has_nested_sums(value):
        return value
    # Term by term: over a common denominator, each radical would double the number of terms.
    return cast(Expr, expand(Add(*map(radsimp, Add.make_args(value)))))


def _has_nested_sums(value: Expr) -> bool:
    """Whether a power of a sum is in another; the time to reduce such roots and fractions is exponential in depth."""
    powers = [power for power in value.atoms(Pow) if power.base.is_Add]
    return any(inner.base.is_Add for power in powers for inner in power.base.atoms(Pow))


def _is_cheap(part: Basic) -> bool:
    """Whether sympy computes a part of an expression in little time, unlike limits or roots of large numbers."""
    match part:
        case Pow(exp=Integer()):
            return True
        case Pow(exp=exponent):
            is_small = _num_bits(exponent) <= _MOST_BITS_OF_DEGREE and _num_bits(part.base) <= _MOST_BITS_OF_ROOT
            return bool(exponent.free_symbols) or is_small
        case log():
            return sum(map(_num_bits, part.args)) <= _MOST_BITS_OF_ROOT
        case _:
            return isinstance(part, _COMPUTED)


def _num_terms(value: Basic) -> float:
    """Return an upper bound on the terms of an expression that is multiplied out.

    >>> _num_terms((1 + Pow(2, Rational(1, 2))) ** 5), _num_terms(Integer(2) * 3)
    (32, 1)
    """
    terms = [_num_terms(arg) for arg in value.args]
    match value:
        case Add():
            return sum(terms)
        case Pow(exp=Integer()) if terms[0] > 1:
            num_factors = abs(int(value.exp))
            return terms[0] ** num_factors if num_factors <= _MOST_TERMS else math.inf
        case _:
            return math.prod(terms)


def _num_bits(value: Any) -> float:
    """Return an upper bound on the bits of the numbers in an expression's value, which isn't computed.

    >>> _num_bits(Rational(1, 2)), _num_bits(Pow(2, Pow(10, 9, evaluate=False), evaluate=False))
    (3, inf)
    """
    num_bits = 0
    match value:
        case Float():
            num_bits = value.num.bc + abs(value.num.exp)
        case Rational():
            num_bits = int(value.p).bit_length() + int(value.q).bit_length()
        case Pow() if value.exp.free_symbols:  # sympy doesn't multiply out such a power
            num_bits = _num_bits(value.base) + _num_bits(value.exp)
        case Pow():
            num_bits = _num_bits(value.base) * _largest_value(value.exp)
        case ExprWithLimits():
            num_bits = math.inf
        case MatrixBase():
            num_bits = sum(map(_num_bits, value.flat()))
        case Expr() if value.args and not isinstance(value, _SMALL_FUNCTIONS):
            num_bits = _num_bits_of_function(value.args)
        case Basic():
            num_bits = (not value.args) + sum(map(_num_bits, value.args))
    return num_bits


def _num_bits_of_function(args: Sequence[Basic]) -> float:
    """Return the bound for a function that may grow as fast as the factorial; sympy computes it of numbers alone."""
    numbers = [arg for arg in args if not arg.free_symbols]
    # The factors of a value such as n! are no larger than n; those of a fraction have its bits too.
    num_factors = sum(map(_largest_value, numbers))
    if num_factors == math.inf:  # the bits of nested functions aren't found twice at each level
        return math.inf
    bits_of_factor = math.log2(num_factors + 1) + sum(_num_bits(arg) for arg in numbers if not isinstance(arg, Integer))
    return num_factors * bits_of_factor + sum(_num_bits(arg) for arg in args if arg.free_symbols)


def _largest_value(value: Basic) -> float:
    """Return an upper bound on the absolute value of a number, at least 1; infinity if it has many bits."""
    match value:
        case Float():
            return max(1.0, abs(float(value)))
        case Rational():
            return max(1, -(-abs(int(value.p)) // int(value.q)))
        case Pow(base=Integer()):
            num_bits = math.log2(max(1, abs(int(value.base)))) * _largest_value(value.exp)
        case _:
            num_bits = _num_bits(value)
    return 2**num_bits if num_bits <= _MOST_BITS.bit_length() else math.inf


@cache
def _silence_library() -> None:
    """Suppress the library's warning, in every process, that its time limits are off."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


@lru_cache(4096)
def _parse_answer(answer: str) -> tuple[Any, ...]:
    """Return the parsed answer; text without LaTeX delimiters is tried as LaTeX first."""
    answer = normalized(answer)
    readings = [answer, f"${answer}$"] if _LATEX_MARK.search(answer) else [f"${answer}$", answer]
    parsed = next((tuple(parsed) for parsed in map(_parse_response, readings) if parsed), ())
    latex = answer if "\\" in answer or "$" in answer else as_latex(answer)
    translated = _parse(f"${latex}$") if latex != answer else []
    if not translated or isinstance(translated[0], str):
        return parsed
    # A response may box the answer in the same notation, which is then compared as text.
    return (*translated, *(part for part in parsed if isinstance(part, str)))


def _parse_response(completion: str) -> list[Any]:
    """Return the parsed final answer, after readings of it in the notation of programs and as a percentage.

    The library reads `pi` as a product of letters, and a percentage as a number, a fraction, or text alone, depending
    on how it is written; here it is both. It drops known units; this drops other unit words, too.
    """
    completion = normalized(completion)
    parsed = _parse(completion)
    text = parsed[-1] if parsed else None
    if not isinstance(text, str):
        return parsed
    if amount := quantity(_as_written(completion, parsed)):
        return [*_parse(f"${amount[0]}$")[:1], text]
    readings = [] if "\\" in text or as_latex(text) == text else [as_latex(text)]
    if percentage := _PERCENTAGE.fullmatch(text):
        readings = [f"{percentage[1]}%", percentage[1]]
    translated = [_parse(f"${reading}$")[:1] for reading in readings]
    return [*(part for parts in translated for part in parts if not isinstance(part, str)), *parsed]


def _as_written(text: str, parsed: Sequence[Any]) -> str:
    """Return the final answer of a text as it is written, if it is in a box, or else as the library simplified it."""
    content = boxed(text)
    if content is not None:
        return content
    return parsed[-1] if parsed and isinstance(parsed[-1], str) else ""


def _parse(text: str) -> list[Any]:
    """Return the expression and the text of the final answer; nothing if there is none, the text alone if it is odd."""
    _silence_library()
    readings = [text, _DOLLAR_SIGN.sub("$", text)] if r"\$" in text else [text]
    for reading in readings:
        if parsed := parse(reading, parsing_timeout=None):  # pyright: ignore[reportArgumentType]
            return parsed
    return []

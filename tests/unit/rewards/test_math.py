import time
from math import factorial

import pytest

from rlpack.rewards import math
from rlpack.rewards.answer_notation import normalized
from rlpack.rewards.answer_words import boxed, differ
from rlpack.rewards.math import equivalent, final_answer_text

DIGITS = "123456789" * 600


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("So the answer is 7.", "7", 1.0),
        ("So the answer is 7.", 7, 1.0),
        ("So the answer is 8.", "7", 0.0),
        (r"Hence $\frac{2}{4}$.", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1+x^2}", "x^2+1", 1.0),
        (r"$\frac{1}{\sqrt 2}$", r"\sqrt{2}/2", 1.0),
        (r"\boxed{(1,3)}", "(1,2)", 0.0),
        ("12345", "12,345", 1.0),
        ("", "7", 0.0),
        ("no idea", "7", 0.0),
        (r"\boxed{\frac34}", "3/4", 1.0),
        (r"\boxed{0.75}", "-3/4", 0.0),
        (r"\boxed{-5}", "-5", 1.0),
        (r"\boxed{5}", "-5", 0.0),
        (r"\boxed{50\%}", r"50\%", 1.0),
        ("So 50%.", "50%", 1.0),
        *(
            (rf"\boxed{{{said}}}", answer, 1.0)
            for said in (r"50\%", "50%")
            for answer in ("50%", r"\boxed{50\%}", "0.5")
        ),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{0.5}", r"50\%", 1.0),
        (r"\boxed{25\%}", "50%", 0.0),
        *((said, r"12.5\%", 1.0) for said in (r"It is 12.5\%.", r"\boxed{12.5}", "So $12.5$.", r"\boxed{0.125}")),
        *((rf"So ${said}$.", "12.5", 1.0) for said in (r"12.5\%", "12.5%")),
        (r"\boxed{\frac{1}{2}\%}", r"\frac{1}{2}\%", 1.0),
        (r"\boxed{50\%\text{ or }60\%}", "50", 0.0),
        (r"\boxed{2*pi}", r"2\pi", 1.0),
        (r"\boxed{pi/2}", r"\frac{\pi}{2}", 1.0),
        (r"\boxed{2*pi}", r"3\pi", 0.0),
        (r"\boxed{3**2}", "9", 1.0),
        ("It is $sqrt(8)$.", r"2\sqrt{2}", 1.0),
        (r"\boxed{[0, 1)}", "[0, 1)", 1.0),
        (r"\boxed{[0, 1]}", "[0, 1)", 0.0),
        (r"\boxed{\{2, 1\}}", "{1, 2}", 1.0),
        (r"\boxed{1, 2}", "1, 2", 1.0),
        (r"\boxed{1234567}", "1,234,567", 1.0),
        (r"\boxed{1{,}234}", "1234", 1.0),
        (r"\boxed{\text{east}}", r"\text{east}", 1.0),
        (r"\boxed{Paris}", "Paris", 1.0),
        (r"\boxed{C}", "(C)", 1.0),
        (r"\boxed{18}", "$18", 1.0),
        (r"\boxed{18}", r"\$18", 1.0),
        (r"\boxed{\$18.90}", r"\$18.90", 1.0),
        (r"\boxed{1000}", r"\$1,000", 1.0),
        (r"It costs \$18.", "18", 1.0),
        (r"\boxed{18}", r"\(18\)", 1.0),
        (r"\boxed{100000}", "10**5", 1.0),
        (r"\boxed{10}", "10**5", 0.0),
        (r"\boxed{10**5}", "10**5", 1.0),
        (r"\boxed{10^{15}}", "10^15", 1.0),
        (r"\boxed{\frac{1}{x^2}}", "x**-2", 1.0),
        (r"\boxed{3x^{12}-1}", "3*x**12 - 1", 1.0),
        (r"\boxed{2\pi}", "2*pi", 1.0),
        (r"\boxed{2*pi}", "2*pi", 1.0),
        (r"\boxed{\frac{\pi}{4}}", "pi/4", 1.0),
        (r"\boxed{[0, 2\pi)}", "[0, 2*pi)", 1.0),
        (r"\boxed{\frac{\sqrt{3}}{2}}", "sqrt(3)/2", 1.0),
        (r"\boxed{\sqrt{\frac{x+1}{2}}}", "sqrt((x+1)/2)", 1.0),
        (r"\boxed{sqrt((x+1)/2)}", "sqrt((x+1)/2)", 1.0),
        (r"\boxed{2^{(n+1)/2}}", "2**((n+1)/2)", 1.0),
        ("7", None, None),
        ("7", "", None),
    ],
)
def test_answers_are_compared_by_value(completion, answer, reward):
    assert equivalent(completion, answer) == reward


SPACES = [r"\,", r"\;", r"\:", r"\ ", "~", " ", "\u00a0", "\u202f"]


@pytest.mark.parametrize("space", SPACES)
def test_a_space_between_groups_of_three_digits_separates_thousands(space):
    thousands, millions = f"10{space}000", f"1{space}234{space}567"
    for said in (rf"\boxed{{{thousands}}}", rf"So ${thousands}$.", rf"\boxed{{\${thousands}}}"):
        assert [equivalent(said, answer) for answer in ("10000", thousands, "10", "0", "1000")] == [1, 1, 0, 0, 0]
    assert [equivalent(rf"\boxed{{{said}}}", thousands) for said in ("10000", "0", "10")] == [1, 0, 0]
    assert [equivalent(rf"\boxed{{{millions}}}", answer) for answer in ("1234567", "1234", "567")] == [1, 0, 0]
    assert final_answer_text(rf"\boxed{{{thousands}}}") == "10000"


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{1, 200}", "1200", 0.0),
        (r"\boxed{1, 200}", "1, 200", 1.0),
        (r"\boxed{10\,00}", "1000", 0.0),
        (r"\boxed{x^2\,100}", r"100x^2", 1.0),
        (r"\boxed{25\,000.5}", "25000.5", 1.0),
        (r"\boxed{25\,500}", "12500", 0.0),
        (r"\begin{pmatrix}1\\ 100\end{pmatrix}", "1100", 0.0),
    ],
)
def test_other_spaces_and_commas_separate_numbers(completion, answer, reward):
    assert equivalent(completion, answer) == reward


@pytest.mark.parametrize("said", ["#8", "####8", "a15b05#8", "so 5.\n####8", "####$8", "item #3 costs 8", "#### 8"])
def test_a_number_needs_no_space_after_a_number_sign(said):
    assert (equivalent(said, "8"), equivalent(said, "#### 8"), equivalent(said, "3")) == (1.0, 1.0, 0.0)
    assert equivalent(said.replace("8", "-8"), "-8") == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        *(
            (said, answer, reward)
            for said in ("It took 2 1/2 hours.", r"\boxed{2 1/2}", "#### 2 1/2", "So $2~1/2$.", r"\boxed{2\,1/2}")
            for answer, reward in (("2.5", 1.0), ("2 1/2", 1.0), ("1.5", 0.0), ("1", 0.0), ("21/2", 0.0))
        ),
        *((rf"\boxed{{{said}}}", "3 3/4", 1.0) for said in ("3.75", r"3\frac34", r"\frac{15}{4}", "3 3/4")),
        *((rf"\boxed{{{said}}}", "3 3/4", 0.0) for said in ("1.5", "3/4", "3", "33/4")),
        (r"\boxed{-2 1/2}", "-2.5", 1.0),
        (r"\boxed{-2 1/2}", "-1.5", 0.0),
        (r"\boxed{-1.5}", "-2 1/2", 0.0),
        ("It is 6 / 2 1/2.", "2.5", 0.0),
        (r"\boxed{1/2 1/2}", "2.5", 0.0),
        (r"\boxed{x^2 1/2}", "x^2/2", 1.0),
    ],
)
def test_a_number_before_a_fraction_is_a_mixed_number(completion, answer, reward):
    assert equivalent(completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{42.}", "42", 1.0),
        (r"\boxed{42.}", "2", 0.0),
        (r"\boxed{3.5.}", "3.5", 1.0),
        (r"\boxed{\$12.}", "12", 1.0),
        *(
            (said, answer, reward)
            for said in ("The answer is \u22125.", "#### \u22125", "It falls from 3 to \u22125.", "\\boxed{\u22125}")
            for answer, reward in (("-5", 1.0), ("\u22125", 1.0), ("5", 0.0), ("3", 0.0))
        ),
        *(
            (said, answer, reward)
            for said in ("The answer is -$5.", r"It is -\$5", "#### -$5", "The change is -$5$.", "It is **-\u20ac5**.")
            for answer, reward in (("-5", 1.0), ("-$5", 1.0), ("5", 0.0))
        ),
        ("She has $20 -$5 = $15 left.", "15", 1.0),
        ("She has $20-$5.", "-5", 0.0),
    ],
)
def test_numbers_have_signs_and_full_stops_as_in_prose(completion, answer, reward):
    assert equivalent(completion, answer) == reward


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        ("ABC", "ABC", 1.0),
        ("BAC", "ABC", 0.0),
        ("HHT", "THH", 0.0),
        ("thh", "HHT", 0.0),
        ("hht", "HHT", 1.0),
        ("yx", r"\text{xy}", 0.0),
        ("on", "no", 0.0),
        ("No", "no", 1.0),
        ("left", "felt", 0.0),
        (r"\text{HHT}", "THH", 0.0),
        (r"\text{HHT}", "HHT", 1.0),
        ("HHT", r"\text{HHT}", 1.0),
        ("H H T", "HHT", 1.0),
        ("go west", "go east", 0.0),
        ("go east", "go east", 1.0),
        ("B", "B", 1.0),
        ("A", "B", 0.0),
        ("pi", "ip", 0.0),
        ("pi", r"\pi", 1.0),
        ("infinity", r"\infty", 1.0),
        ("ab", r"b \cdot a", 1.0),
        ("x or y", "y or x", 1.0),
        ("A. 5", "B. 5", 0.0),
        ("A. 5", "A. 6", 0.0),
        ("A. 5", "A. 5", 1.0),
        ("A. 5", "5", 1.0),
        ("2 pm", "2 am", 0.0),
        (r"2\text{ p.m.}", "2 am", 0.0),
        (r"2\text{ p.m.}", "2 pm", 1.0),
        ("2 pm", "2", 1.0),
    ],
)
def test_words_labels_and_halves_of_the_day_are_compared_as_text(said, answer, reward):
    assert equivalent(rf"\boxed{{{said}}}", answer) == reward
    assert equivalent(f"It is ${said}$.", answer) == reward or reward == 0.0


@pytest.mark.parametrize(
    ("said", "answer"),
    [("pq", "qp"), ("mn", "nm"), ("xy", "yx"), ("ab", "ba"), ("kx", "xk"), ("xyz", "zyx"), ("xy", r"y \cdot x")],
)
def test_two_or_three_letters_in_lower_case_are_a_product(said, answer):
    assert equivalent(rf"\boxed{{{said}}}", answer) == equivalent(rf"\boxed{{{answer}}}", said) == 1.0
    assert final_answer_text(rf"\boxed{{{said}}}") == final_answer_text(rf"\boxed{{{answer}}}")
    assert equivalent(rf"\boxed{{{said.upper()}}}", said[::-1].upper()) == 0.0
    assert equivalent(rf"\boxed{{\text{{{said}}}}}", rf"\text{{{said[::-1]}}}") == 0.0


@pytest.mark.parametrize(
    ("said", "answer"), [("on", "no"), ("is", "si"), ("dog", "god"), ("ten", "net"), ("was", "saw")]
)
def test_short_words_are_no_products(said, answer):
    assert equivalent(rf"\boxed{{{said}}}", answer) == equivalent(rf"\boxed{{{answer}}}", said) == 0.0


def test_words_outside_boxes_are_compared_as_text():
    assert [equivalent("I think $on$.", answer) for answer in ("on", "no")] == [1.0, 0.0]
    assert equivalent(r"\boxed{cat} or \boxed{dog}", "dog") == 0.0
    assert [final_answer_text(rf"\boxed{{{said}}}") for said in ("on", "no", r"\text{No}")] == ["on", "no", "no"]


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        *(
            (said, answer, reward)
            for said in ("18 dollars", r"18\text{ dollars}", r"\$18 dollars", "18 dollars.", "€18", "€18.00", "18€")
            for answer, reward in (("18", 1.0), ("18.5", 0.0), ("8", 0.0), ("1", 0.0), ("-18", 0.0))
        ),
        ("36 eggs", "36", 1.0),
        ("36 eggs", "36 eggs", 1.0),
        ("18 dollars", "18 dollar", 1.0),
        ("36 eggs", "36 hens", 0.0),
        ("5 units", "5 square units", 1.0),
        ("5 cubic units", "5 units", 1.0),
        ("5 units", "5 meters", 1.0),
        ("5 square units", "6 units", 0.0),
        ("36 square inches", "36 inches", 1.0),  # the dimension may be left out
        ("36 inches", "36 square inches", 1.0),
        ("36 square inches", "36 square feet", 0.0),
        ("36", "36 eggs", 1.0),
        ("35", "36 eggs", 0.0),
        ("20 people per day", "20", 1.0),
        ("18 dollars", "18 cents", 0.0),
        ("5 mins", "5 minutes", 1.0),
        ("5 litres", "5 liters", 1.0),
        ("1,200 dollars", "1200", 1.0),
        ("1,200 dollars", "1", 0.0),
        ("2 1/2 cups", "2.5", 1.0),
        ("2 1/2 cups", "1", 0.0),
        ("-€18", "-18", 1.0),
        ("-€18", "18", 0.0),
        *((f"5 {words}", "5", 0.0) for words in ("million", "dozen eggs", "theta", "sqrt", "squared", "abcd", "xy")),
        *((f"5 {words}", "5", 0.0) for words in ("point two", "hours or more", "eggs or 6 eggs", "halves", "quarters")),
        ("101 base two", "101", 0.0),
        *(
            (f"3 {words}", "3", 0.0)
            for words in ("fourth", "fourths", "hundredths", "thousandths", "twentieths", "tens")
        ),
        *((f"3 {words}", "3", 0.0) for words in ("lakh", "crores", "grand", "thousands of dollars", "parts per mille")),
        *((f"3 {words}", "3", 0.0) for words in ("degrees below", "units left", "short", "root", "roots", "arccos")),
        *((f"0.3 {word}", "0.3", 0.0) for word in ("repeating", "recurring", "repeats")),
        ("77 octal", "77", 0.0),
        (r"\$5 grand", "5", 0.0),
        ("$3 fourths", "3", 0.0),
        *((f"3 {words}", "3", 1.0) for words in ("months", "month", "feet", "people", "crayons", "units", "seconds")),
        *((f"3 {words}", "3", 1.0) for words in ("miles per hour", "eggs each", "square feet", "cities", "tanks")),
    ],
)
def test_units_and_currencies_are_left_out_of_numbers(said, answer, reward):
    assert equivalent(rf"\boxed{{{said}}}", answer) == reward


@pytest.mark.parametrize("words", ["fourths", "hundredths", "repeating", "lakh", "grand", "octal", "degrees below"])
def test_a_number_with_words_that_change_it_has_another_text(words):
    assert final_answer_text(rf"\boxed{{3 {words}}}") != "3"


@pytest.mark.parametrize("text", ["\\boxed{", "\\text{", "{", "5 eggs ", "ab ", r"\text{a", "a", "5,"])
def test_the_time_to_compare_words_is_in_proportion_to_the_text(text):
    began = time.process_time()
    text *= 400_000 // len(text)
    differ(boxed(rf"\boxed{{{text}}}") or text, text)
    assert time.process_time() - began < 10.0


@pytest.mark.parametrize("text", ["1 000 ", "1 1/", "1~", " ", r"1\,", "-$", "000 000", "1", "1.}", "2 1/2 "])
def test_the_time_to_rewrite_numbers_is_in_proportion_to_the_text(text):
    began = time.process_time()
    normalized(text * (400_000 // len(text)))
    assert time.process_time() - began < 10.0


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("0.5", "1/2"),
        (r"\boxed{0.5x + 0.25}", "x/2 + 1/4"),
        (r"\boxed{x^{0.5}}", "sqrt(x)"),
        (r"\boxed{1.1^{10}}", "25937424601/10000000000"),
        (r"\boxed{\sin(0.5)}", "sin(1/2)"),
        (r"\boxed{10!}", "3628800"),
        (r"\boxed{3^{2023}}", str(3**2023)),
        (r"\boxed{x = 2}", "2"),
        (r"\boxed{\{2, 3\}}", "{2, 3}"),
        (r"\boxed{\infty}", "oo"),
        (r"\boxed{100!}", str(factorial(100))),
        (r"\boxed{2*pi}", "2*pi"),
        (r"\boxed{2^{2^{2^2}}}", "65536"),
        (r"\boxed{100e^{0.05t}}", "100*exp(t/20)"),
        (r"\boxed{\arctan(0.1x)}", "atan(x/10)"),
        (r"\boxed{\sinh(0.1x)}", "sinh(x/10)"),
        (r"\boxed{|0.1x|}", "Abs(x)/10"),
        (r"\boxed{\binom{0.1n}{3}}", "binomial(n/10, 3)"),
        (r"\boxed{1.05^{0.1t}}", "(21/20)**(t/10)"),
    ],
)
def test_the_text_of_an_answer_is_its_value_with_fractions(completion, text):
    assert final_answer_text(completion) == text


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("sqrt(2)/2", [r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}", r"\sqrt{\frac12}", r"x = \sqrt{0.5}", r"2^{-1/2}"]),
        ("5", ["5", "x=5", "x = 2 + 3", r"5\%", "5%", "f(x) = 5", "5.0", r"\frac{10}{2}", r"\sqrt{25}", "5 eggs"]),
        ("1/2", ["0.5", r"\frac24", r"0.5\%", r"\sin(\frac{\pi}{6})", r"\log_4 2"]),
        ("1024", ["1024", "2^{10}", r"4^5", r"\binom{1024}{1}", "1,024", r"1\,024"]),
        ("2*sqrt(3)", [r"2\sqrt{3}", r"\sqrt{12}", r"\frac{6}{\sqrt3}", r"y = \sqrt3+\sqrt3"]),
        ("-1 + sqrt(2)", [r"\sqrt2-1", r"\frac{1}{1+\sqrt2}", r"\sqrt{2} - 1.0"]),
        ("3 - 2*sqrt(2)", [r"(1-\sqrt2)^2", r"3-\sqrt8"]),
        ("2*x + 3", ["y=2x+3", "3+2x"]),
    ],
)
def test_equal_answers_have_the_same_text(text, answers):
    assert {final_answer_text(rf"\boxed{{{answer}}}") for answer in answers} == {text}
    assert {equivalent(rf"\boxed{{{answer}}}", answers[0]) for answer in answers} == {1.0}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("5", "-5"),
        ("5", "x>5"),
        ("5", "2x=5"),
        ("0.5", "50"),
        (r"\sqrt{12}", r"3\sqrt{2}"),
        (r"\frac{1}{1+\sqrt2}", r"1-\sqrt2"),
        ("x=x+1", "x+1"),
        ("x+y=5", "5"),
        ("2^{10}", "1025"),
    ],
)
def test_different_answers_have_different_texts(one, other):
    assert final_answer_text(rf"\boxed{{{one}}}") != final_answer_text(rf"\boxed{{{other}}}")


@pytest.mark.parametrize(
    "answer",
    [
        r"\sqrt{" + DIGITS[:2400] + "}",
        r"\sqrt[3]{" + DIGITS[:2400] + r"}+\sqrt{" + DIGITS[1:2400] + "}",
        r"\log_{" + DIGITS[:1200] + "}{" + DIGITS[1:1200] + "}",
        r"\sin(" + DIGITS[:2400] + r"\pi)",
        r"(1+\sqrt2)^{1000}",
        "".join(rf"(1+\sqrt{{{number}}})" for number in range(2, 32)),
        r"\frac{1}{" + "+".join(rf"\sqrt{{{number}}}" for number in (2, 3, 5, 7, 11, 13, 17)) + "}",
        r"\frac{1}{1+" * 20 + r"\sqrt2" + "}" * 20,
        r"\sqrt{1+" * 20 + r"\sqrt2" + "}" * 20,
        r"\frac{1}{\sqrt{1+" * 12 + r"\sqrt2" + "}}" * 12,
        "+".join(rf"\frac{{1}}{{1+\sqrt{{{number}}}}}" for number in range(2, 18)),
        "".join(rf"\frac{{1}}{{1+\sqrt{{{number}}}}}" for number in range(2, 7)),
        r"\frac{1}{" + "+".join(rf"\sqrt[3]{{{number}}}" for number in range(2, 33)) + "}",
        r"\frac{\sqrt{2}+\sqrt{3}}{" + "+".join(rf"\sqrt{{{number}}}" for number in (5, 7, 11, 13)) + "}",
        rf"\sqrt{{{(10**37 + 43) * (10**38 + 133)}}}",
        rf"\log_{{{10**37 + 43}}}{{{(10**37 + 43) ** 1}}}",
        r"(\frac{123456789123456789}{987654321987654321})^{\frac{1}{1000003}}",
        r"(2x)^{\frac{1}{1000000007}}",
        r"(1+2i)^{1000}",
        "800!",
        r"\lim_{x \to 0} \frac{\sin^9 x}{x^9}",
        r"\arctan(" + DIGITS[:2400] + ")",
        "x^{2000}+(x+1)^{2000}",
    ],
    ids=lambda answer: answer[:30],
)
def test_answers_are_simplified_in_little_time(answer):
    completion = rf"\boxed{{{answer}}}"
    began = time.process_time()
    math._parse_response(completion)
    read = time.process_time()
    assert final_answer_text(completion)
    assert time.process_time() - read < 5.0 + 2 * (read - began)


@pytest.mark.parametrize("answer", ["e^{-0.1x}", "e^{-0.1 x}", r"\exp(-0.1x)", r"e^{-x \cdot 0.1}"])
def test_functions_are_the_same_answer_however_they_are_written(answer):
    assert final_answer_text(rf"\boxed{{{answer}}}") == "exp(-x/10)"


@pytest.mark.parametrize(
    "answer",
    [
        f"0.{DIGITS}",
        r"1.5 \times 10^{99999}",
        "1.1^{100000}",
        "1.1^{100000000}",
        "0.5^{1000000000}",
        "1.0000001^{10000000}",
        "0.5^{1000000000}+1",
        "1+9^{9^{9^9}}",
        "1+e^{e^{e^{100}}}",
        r"1+\sqrt[3]{9^{9^{9^9}}}",
        r"\frac{0.5}{9^{9^{9^9}}}",
        "0.5+100000!",
        "e^{" * 40 + "0.5" + "}" * 40,
        r"\begin{pmatrix}0.5^{1000000000}\end{pmatrix}",
        r"\{9^{9^{9^9}}, 0.5\}",
        "x^{9^{9^9}}+0.5",
        "0.5x+2^{x+9^{9^{9^9}}}",
        "0.5+|9^{9^{9^9}}|",
        "0.5+(10^9+0.5)!",
        r"0.5+\binom{10^9}{5 \cdot 10^8}",
        r"\binom{0.5+10^6}{10^6}",
    ],
    ids=lambda answer: answer[:30],
)
def test_an_answer_with_very_large_numbers_is_left_as_it_is_written(answer):
    assert final_answer_text(rf"\boxed{{{answer}}}") == answer


def test_an_answer_that_sympy_can_not_simplify_is_left_as_it_is_written(monkeypatch):
    monkeypatch.setattr(math, "nsimplify", lambda *_, **__: 1 / 0)
    assert final_answer_text(r"\boxed{\frac{0.5}{4}}") == r"\frac{0.5}{4}"


@pytest.mark.parametrize("answer", [None, "", "7"])
def test_a_response_is_read_even_if_there_is_no_answer(answer, monkeypatch):
    read, parse = [], math._parse
    monkeypatch.setattr(math, "_parse", lambda text: read.append(text) or parse(text))
    equivalent("It is 7.", answer)
    assert "It is 7." in read


@pytest.mark.parametrize("text", ["\\" * 1500 + "$ x", "\\" * 100_000, r"\$" * 1500])
def test_a_response_with_many_backslashes_is_read_twice_at_most(text, monkeypatch):
    readings, parse = [], math.parse
    monkeypatch.setattr(math, "parse", lambda reading, **options: readings.append(reading) or parse(reading, **options))
    equivalent(text, None)
    assert len(readings) <= 2

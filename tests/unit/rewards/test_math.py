import pytest

from rlpack.rewards import math
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
        ("7", None, None),
        ("7", "", None),
    ],
)
def test_answers_are_compared_by_value(completion, answer, reward):
    assert equivalent(completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("0.5", "1/2"),
        (r"\boxed{0.5x + 0.25}", "x/2 + 1/4"),
        (r"\boxed{x^{0.5}}", "sqrt(x)"),
        (r"\boxed{1.1^{10}}", "25937424601/10000000000"),
        (r"\boxed{\sin(0.5)}", "sin(1/2)"),
        (r"\boxed{10!}", "factorial(10)"),
        (r"\boxed{3^{2023}}", "3**2023"),
        (r"\boxed{x = 2}", "Eq(x, 2)"),
        (r"\boxed{\{2, 3\}}", "{2, 3}"),
        (r"\boxed{\infty}", "oo"),
    ],
)
def test_the_text_of_an_answer_is_its_value_with_fractions(completion, text):
    assert final_answer_text(completion) == text


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
    ],
    ids=lambda answer: answer[:30],
)
def test_an_answer_with_very_large_numbers_is_left_as_it_is_written(answer):
    assert final_answer_text(rf"\boxed{{{answer}}}") == answer


def test_an_answer_that_sympy_can_not_simplify_is_left_as_it_is_written(monkeypatch):
    monkeypatch.setattr(math, "nsimplify", lambda *_, **__: 1 / 0)
    assert final_answer_text(r"\boxed{\frac{2}{4}}") == r"\frac{2}{4}"


@pytest.mark.parametrize("answer", [None, "", "7"])
def test_a_response_is_read_even_if_there_is_no_answer(answer, monkeypatch):
    read, parse = [], math._parse
    monkeypatch.setattr(math, "_parse", lambda text: read.append(text) or parse(text))
    equivalent("It is 7.", answer)
    assert "It is 7." in read

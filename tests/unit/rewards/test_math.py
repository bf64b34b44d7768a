import pytest

from rlpack.rewards.math import equivalent


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

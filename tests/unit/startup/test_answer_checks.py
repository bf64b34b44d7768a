"""Answers that contain the marker of `final_answer`, as those of GSM8K do."""

import pytest

from rlpack.config.schema import Config, Reward, RewardFunction, Role, builtin_roles
from rlpack.data.examples import Example
from rlpack.rewards.errors import RewardError
from rlpack.startup.answer_checks import answer_warnings, check_answers
from rlpack.startup.dataset_checks import check_reward_columns

FINAL_ANSWER = "rlpack.rewards.functions:final_answer"


def rows(*answers):
    return [Example(uid=str(number), prompt="q", answer=answer) for number, answer in enumerate(answers)]


def test_answers_that_no_response_can_equal_are_refused():
    examples = rows("48 + 24 = 72\n#### 72", "4\n#### 4", None)
    with pytest.raises(RewardError) as caught:
        check_reward_columns(Config(), examples, "gsm.jsonl")
    assert str(caught.value) == (
        f"reward.function is {FINAL_ANSWER}, which compares the text after a response's last '#', but 2 of the 2 "
        "answers in gsm.jsonl (data.answer_column=answer) contain '#', such as '48 + 24 = 72\\n#### 72', so no "
        "response can equal them; store only the text after '#' there, or set "
        "reward.function=rlpack.rewards.math:equivalent"
    )
    named = Reward(functions={"right": RewardFunction(function=FINAL_ANSWER, arguments={"marker": "####"})})
    with pytest.raises(
        RewardError, match=r"^reward.functions.right.function is .* last '####', but 2 of the 2 answers"
    ):
        check_answers(Config(reward=named), examples, "gsm.jsonl")


def test_some_answers_that_no_response_can_equal_are_a_warning():
    examples = rows("#### 72", "72", 4)
    check_answers(Config(), examples, "a.jsonl")
    (warning,) = answer_warnings(Config(), examples, "a.jsonl")
    assert "but 1 of the 3 answers in a.jsonl" in warning
    assert answer_warnings(Config(), rows("#### 72"), "a.jsonl") == []


@pytest.mark.parametrize(
    "sections",
    [
        {"reward": Reward(function="rlpack.rewards.math:equivalent")},
        {"reward": Reward(arguments={"marker": "<answer>"})},
        {"roles": {**builtin_roles(), "reward": Role(target="mine:Reward")}},
    ],
)
def test_other_rewards_and_markers_take_such_answers(sections):
    check_answers(Config(**sections), rows("#### 72"), "a.jsonl")
    assert answer_warnings(Config(**sections), rows("#### 72"), "a.jsonl") == []


def test_rows_without_an_answer_have_no_marker():
    check_answers(Config(), rows(None, "72"), "a.jsonl")
    check_answers(Config(), [], "a.jsonl")

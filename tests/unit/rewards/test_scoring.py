import json
import math
import pickle
import re
import sys

import numpy as np
import pytest
import torch

from rlpack.rewards.errors import RewardError
from rlpack.rewards.functions import final_answer
from rlpack.rewards.scoring import call_reward, check_signature, resolve


def score(function, rows=2, columns=None, arguments=None):
    texts = [f"text {row}" for row in range(rows)]
    return call_reward(function, texts, texts, columns or {}, arguments or {})


def returning(value):
    return lambda prompts, completions: value


def test_numbers_of_any_kind_become_float32():
    scores = score(returning([1, 0.5, np.float64(2.0), np.float32(0.25), np.int64(3)]), rows=5)
    assert scores.values.dtype == torch.float32
    assert scores.values.tolist() == [1, 0.5, 2, 0.25, 3]
    assert not scores.quarantined.any()
    assert scores.counts == {}
    assert score(returning(np.array([1.0, 2.0]))).values.tolist() == [1, 2]


def test_rewards_that_are_no_finite_numbers_are_quarantined_and_counted():
    values = [1.0, None, math.nan, math.inf, -math.inf, 1e308, np.float32("nan"), 10**400]
    scores = score(returning(values), rows=8)
    assert scores.quarantined.tolist() == [False] + [True] * 7
    assert scores.values.tolist() == [1.0] + [0.0] * 7
    assert scores.counts == {"none": 1, "nan": 2, "infinite": 4}


@pytest.mark.parametrize("value", [[True, False], np.array([True, False]), [np.bool_(True), False], (1, np.False_)])
def test_a_comparison_is_a_reward_of_one_or_zero(value):
    scores = score(returning(value))
    assert scores.values.tolist() == [1.0, 0.0]
    assert not scores.quarantined.any()


def test_quarantined_rows_are_logged_with_their_reasons_every_time(caplog):
    score(returning([1.0, 2.0]))
    assert not caplog.records
    for _ in range(2):
        caplog.clear()
        score(returning([1.0, None, math.nan, None]), rows=4)
        assert "3 of 4 rows are quarantined (nan: 1, none: 2)" in caplog.text
    score(returning([None, None]))
    assert "all 2 rows are quarantined (none: 2); none of them trains" in caplog.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "returned a NoneType"),
        ("11", "returned a str"),
        ({0: 1.0, 1: 1.0}, "returned a dict"),
        (torch.ones(2), "returned a Tensor"),
        (1.0, "returned a float"),
        ([1.0], "returned 1 rewards for 2 rows"),
        ([1.0] * 3, "returned 3 rewards for 2 rows"),
        ([1.0, "1"], "gave row 1 a str"),
        ([[1.0], [1.0]], "gave row 0 a list"),
        (np.ones((2, 2)), "gave row 0 a ndarray"),
        ([1.0, torch.tensor(1.0)], "gave row 1 a Tensor"),
        ([1.0, 1j], "gave row 1 a complex"),
    ],
)
def test_what_is_no_list_of_one_number_a_row_is_refused(value, text):
    with pytest.raises(RewardError, match=text):
        score(returning(value))


def test_a_function_that_raises_is_named_with_its_reason():
    def broken(prompts, completions):
        raise KeyError("answer")

    with pytest.raises(RewardError, match="broken raised KeyError: 'answer'") as caught:
        score(broken)
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_function_that_raises_is_named_with_its_own_file_and_line_even_when_a_package_raised():
    def broken(prompts, completions):
        return [json.loads(text) for text in completions]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"JSONDecodeError: .* \({re.escape(__file__)}, line {line}\)"):
        score(broken)


def test_a_coroutine_is_refused_and_closed():
    async def waiting(prompts, completions):
        return [1.0, 1.0]

    with pytest.raises(RewardError, match="without async"):
        score(waiting)


def test_a_function_cannot_change_the_batch():
    def greedy(prompts, completions, answer):
        prompts.clear()
        completions.append("x")
        answer.reverse()
        return [0.0, 0.0]

    prompts, completions, answer = ["p", "q"], ["a", "b"], ["1", "2"]
    call_reward(greedy, prompts, completions, {"answer": answer}, {})
    assert (prompts, completions, answer) == (["p", "q"], ["a", "b"], ["1", "2"])


def test_a_function_gets_the_columns_that_it_names_or_all():
    columns = {"answer": ["1", "2"], "level": [3, 4]}
    seen = {}

    def named(prompts, completions, level):
        seen["named"] = level
        return [0.0, 0.0]

    def everything(prompts, completions, **rest):
        seen["everything"] = rest
        return [0.0, 0.0]

    score(named, columns=columns)
    score(everything, columns=columns, arguments={"scale": 2})
    assert seen == {"named": [3, 4], "everything": columns | {"scale": 2}}


def test_a_column_or_an_argument_that_does_not_exist_is_named():
    with pytest.raises(RewardError, match=r"needs 'answer'; the dataset has the columns \['level'\]"):
        score(final_answer, columns={"level": [1, 2]})
    with pytest.raises(RewardError, match=r"reward\.arguments\.marked is not an argument"):
        score(final_answer, columns={"answer": ["1", "2"]}, arguments={"marked": "#"})


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (math.sqrt, {}, "reward function math:sqrt can't take the texts: .*'prompts'; write it as def score"),
        (lambda prompts, completions, /: [], {}, "can't take the texts"),
        (print, {}, "can't take the texts"),
        (dict, {}, "doesn't say what it takes; write it as def score"),
        (lambda prompts, completions, level: [], {}, r"needs 'level'; the dataset has the columns \['answer'\]"),
        (lambda prompts, completions: [], {"scale": 2}, r"reward\.arguments\.scale is not an argument"),
    ],
)
def test_what_a_function_can_not_take_is_known_before_it_is_called(function, arguments, text):
    with pytest.raises(RewardError, match=text):
        check_signature(function, ["answer"], arguments)
    check_signature(final_answer, ["answer", "uid"], {"marker": "="})


def test_arguments_reach_the_function():
    found = score(final_answer, columns={"answer": ["0", "2"]}, arguments={"marker": "text "})
    assert found.values.tolist() == [1.0, 0.0]


def test_no_rows_give_no_rewards():
    scores = score(returning([]), rows=0)
    assert scores.values.shape == (0,)
    assert scores.quarantined.dtype == torch.bool


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("rlpack.rewards.functions.final_answer", "package.module:function"),
        (":final_answer", "package.module:function"),
        ("rlpack.rewards.functions:", "package.module:function"),
        ("rlpack.rewards.functions:a b", "package.module:function"),
        ("no_such_package.rewards:f", "can't be imported: ModuleNotFoundError"),
        ("rlpack.rewards.functions:final_answr", "its functions are: final_answer, exact_match"),
        ("rlpack.rewards.scoring:_LARGEST", "is a float and not a function"),
    ],
)
def test_a_target_that_names_no_function_is_refused_with_the_way_out(target, text):
    with pytest.raises(RewardError, match=text):
        resolve(target)


def test_a_module_that_fails_while_it_is_imported_is_reported_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("import math\nmath.no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match="broken_rewards can't be imported: AttributeError"):
        resolve("broken_rewards:f")
    assert "broken_rewards" not in sys.modules

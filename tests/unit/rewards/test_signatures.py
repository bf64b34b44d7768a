import math
import sys

import pytest

from rlpack.rewards.errors import RewardError
from rlpack.rewards.functions import final_answer
from rlpack.rewards.signatures import check_signature, read_signature, resolve
from tests.unit.rewards import samples


@pytest.mark.parametrize(
    ("function", "kind", "is_async"),
    [
        (samples.batched, "batched", False),
        (samples.single, "single", False),
        (samples.single_completion, "single", False),
        (samples.waiting, "single", True),
        (samples.waiting_batch, "batched", True),
        (samples.instance, "single", True),
        (samples.compute_score, "verl", False),
        (lambda prompts: [], "batched", False),
    ],
)
def test_a_signature_says_how_its_function_is_called(function, kind, is_async):
    signature = read_signature(function)
    assert (signature.kind, signature.is_async) == (kind, is_async)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (samples.mixed, r"mixes completions \(batched\) and prompt \(single\); write it as def f"),
        (samples.silent, "doesn't name the texts that it takes; write it as def f"),
        (math.sqrt, "math:sqrt doesn't name the texts that it takes"),
        (print, "doesn't name the texts that it takes"),
        (dict, "has no readable signature"),
        (samples.positional, "can't take 'prompts' by keyword; remove the /"),
        (lambda solution_str, ground_truth: 1.0, "doesn't name the texts that it takes"),
    ],
)
def test_a_signature_that_follows_no_convention_or_two_is_refused(function, text):
    with pytest.raises(RewardError, match=text):
        read_signature(function)


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (
            samples.batched,
            {},
            r"samples:batched needs 'level'; the dataset has .*\['answer', 'data_source'\]",
        ),
        (lambda completions: [], {"scale": 2}, r"reward\.arguments\.scale is not an argument .*; remove it$"),
        (final_answer, {"maker": "="}, r"reward\.arguments\.maker is not .*:final_answer; did you mean 'marker'\?$"),
        (lambda completion, solution: 0.0, {}, r"^reward\.function=.* needs 'solution'; .*; did you mean 'answer'\?$"),
        (lambda completion, answr: 0.0, {}, r"^reward\.function=.* needs 'answr'; .*; did you mean 'answer'\?$"),
        (samples.single, {"prompt": "x"}, r"reward\.arguments\.prompt is filled from the response"),
    ],
)
def test_missing_columns_and_unknown_arguments_are_refused_before_a_call(function, arguments, text):
    with pytest.raises(RewardError, match=text):
        check_signature(read_signature(function), ["answer", "data_source"], arguments)


def test_the_columns_of_the_dataset_are_told_from_what_is_made_of_them():
    names, keys = ["uid", "answer", "finish_reason", "level"], {"question": "data.prompt_column"}
    keys |= {"label": "data.answer_column", "worked": "data.completion_column"}
    with pytest.raises(RewardError) as caught:
        check_signature(read_signature(lambda completion, difficulty: 0.0), names, {}, column_keys=keys)
    assert str(caught.value).endswith(
        "needs 'difficulty'; the dataset has the columns ['label', 'level', 'question'] (also available: answer, "
        "completion, finish_reason, prompt, uid); add the column, or set reward.arguments.difficulty"
    )


def test_arguments_and_columns_that_a_function_names_are_taken():
    check_signature(read_signature(final_answer), ["answer", "uid"], {"marker": "="})
    check_signature(read_signature(samples.everything), [], {"anything": 1})
    check_signature(read_signature(samples.compute_score), ["answer", "data_source"], {})
    check_signature(read_signature(samples.compute_score), ["answer"], {"data_source": "sums"})
    with pytest.raises(
        RewardError, match=r"needs 'data_source'; .*; add the column, or set reward\.arguments\.data_source$"
    ):
        check_signature(read_signature(samples.compute_score), ["answer"], {})


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda completion, question: 0.0,
            "needs 'question', which is data.prompt_column; call the parameter 'prompt'",
        ),
        (lambda completions, question: [], "needs 'question', .*data.prompt_column; call the parameter 'prompts'"),
        (lambda completion, label: 0.0, "needs 'label', which is data.answer_column; call the parameter 'answer'"),
        (
            lambda data_source, solution_str, ground_truth, label: 0.0,
            "needs 'label', which is data.answer_column; call the parameter 'ground_truth'",
        ),
        (
            lambda data_source, solution_str, ground_truth, question: 0.0,
            "needs 'question', which is data.prompt_column and isn't passed to functions like verl's",
        ),
        (
            lambda completion, worked: 0.0,
            "needs 'worked', which is data.completion_column and isn't passed to reward functions; remove the",
        ),
    ],
)
def test_the_columns_of_prompts_answers_and_demonstrations_have_other_names(function, text):
    keys = {"question": "data.prompt_column", "label": "data.answer_column", "worked": "data.completion_column"}
    with pytest.raises(RewardError, match=rf"^reward\.function=.* {text}"):
        check_signature(read_signature(function), ["answer", "data_source"], {}, column_keys=keys)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("rlpack.rewards.functions.final_answer", "package.module:function"),
        (":final_answer", "package.module:function"),
        ("rlpack.rewards.functions:", "package.module:function"),
        ("rlpack.rewards.functions:a b", "package.module:function"),
        ("no_such_package.rewards:f", "can't be imported: ModuleNotFoundError"),
        ("rlpack.rewards.functions:final_answr", "its functions are: .*final_answer"),
        ("rlpack.rewards.reward_result:MAX_REWARD", "is of type float and not a function"),
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
    (tmp_path / "leaving_rewards.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RewardError, match="leaving_rewards can't be imported: SystemExit: 0"):
        resolve("leaving_rewards:f")

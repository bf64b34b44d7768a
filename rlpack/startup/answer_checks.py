"""Check that a response can match the answers, as the built-in reward function `final_answer` compares them."""

from collections.abc import Iterator, Sequence

from rlpack.config.roles import calls_reward_functions
from rlpack.config.schema import Config
from rlpack.data.examples import Example
from rlpack.rewards.errors import RewardError

FINAL_ANSWER, _MARKER = "rlpack.rewards.functions:final_answer", "#"
_LONGEST_SHOWN = 60


def check_answers(config: Config, examples: Sequence[Example], source: str) -> None:
    """Raise if every answer contains the marker of `final_answer`, so that all rewards would be 0.

    Raises:
        RewardError: names the function's key, the marker and an answer.
    """
    for is_in_all, problem in _problems(config, examples, source):
        if is_in_all:
            raise RewardError(problem)


def answer_warnings(config: Config, examples: Sequence[Example], source: str) -> list[str]:
    """Return warnings about answers of which only some contain the marker of `final_answer`."""
    return [problem for is_in_all, problem in _problems(config, examples, source) if not is_in_all]


def _problems(config: Config, examples: Sequence[Example], source: str) -> Iterator[tuple[bool, str]]:
    """Yield (whether no answer can be equalled, what is wrong) for each use of `final_answer`."""
    reward = config.reward
    functions = {
        f"reward.functions.{name}.function": (one.function, one.arguments) for name, one in reward.functions.items()
    }
    functions = functions or {"reward.function": (reward.function, reward.arguments)}
    if not calls_reward_functions(config):
        return
    answers = [str(example.answer) for example in examples if example.answer is not None]
    for key, (function, arguments) in functions.items():
        marker = arguments.get("marker", _MARKER)
        if function != FINAL_ANSWER or not isinstance(marker, str) or not marker:
            continue
        if with_marker := [answer for answer in answers if marker in answer]:
            number = f"{len(with_marker)} of the {len(answers)} answers"
            answer = with_marker[0]
            shown = repr(answer if len(answer) <= _LONGEST_SHOWN else f"… {answer[-_LONGEST_SHOWN:]}")
            yield (
                len(with_marker) == len(answers),
                f"{key} is {function}, which compares the text after a response's last {marker!r}, but {number} in "
                f"{source} (data.answer_column={config.data.answer_column}) contain {marker!r}, such as {shown}, so no "
                f"response can equal them; store only the text after {marker!r} there, or set "
                f"{key}=rlpack.rewards.math:equivalent",
            )

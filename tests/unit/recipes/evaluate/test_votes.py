"""How `rlpack evaluate` reads the answers that majority votes count."""

import pytest

from rlpack.config.recipes import EVALUATE_TARGET, config_class
from rlpack.recipes.evaluate.evaluate_model import reader_of_votes

JUDGE = "rlpack.workers.judge:JudgeWorker"


@pytest.mark.parametrize(
    ("role", "description"), [(None, "rlpack.rewards.functions:final_answer"), (JUDGE, "exact text")]
)
def test_votes_are_for_answers_of_the_function_that_scored(role: str | None, description: str):
    values = config_class(EVALUATE_TARGET)().model_dump(mode="json")
    if role is not None:
        values["roles"]["reward"]["target"] = role
    reader = reader_of_votes(config_class(EVALUATE_TARGET).model_validate(values))
    assert description in reader.description
    assert reader.is_extracted == (role is None)

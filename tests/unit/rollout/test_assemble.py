import pytest
import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.assemble import rollout_batch
from rlpack.rollout.engine import Generations
from rlpack.rollout.errors import EngineError


def generations(rows, logprobs):
    return Generations(
        token_ids=Ragged.from_rows(rows, torch.int64),
        logprobs=Ragged.from_rows(logprobs, torch.float32),
        finish_reasons=["length"] * len(rows),
        policy_version=4,
    )


def test_rows_are_prompts_followed_by_responses_with_every_column_aligned():
    prompts = Ragged.from_rows([[5, 6], [7], [8, 9, 9]], torch.int64)
    batch = rollout_batch(
        prompts,
        generations([[1, 6], [], [2]], [[-0.5, -1.0], [], [-2.0]]),
        group_ids=torch.tensor([3, 3, 4]),
        uids=["a", "a", "b"],
        vocab_size=10,
    )
    assert [row.tolist() for row in batch["input_ids"].rows()] == [[5, 6, 1, 6], [7], [8, 9, 9, 2]]
    masks = [[False, False, True, True], [False], [False, False, False, True]]
    assert [row.tolist() for row in batch["response_mask"].rows()] == masks
    assert [row.tolist() for row in batch["rollout_logprobs"].rows()] == [[0, 0, -0.5, -1.0], [0], [0, 0, 0, -2.0]]
    assert batch["prompt_lengths"].tolist() == [2, 1, 3]
    assert batch["group_ids"].tolist() == [3, 3, 4]
    assert batch["policy_version"].tolist() == [4, 4, 4]
    assert batch["finish_reason"] == ["length"] * 3
    assert batch["uid"] == ["a", "a", "b"]


def test_no_rows_make_an_empty_batch():
    empty = torch.zeros(0, dtype=torch.int64)
    batch = rollout_batch(Ragged.from_rows([], torch.int64), generations([], []), group_ids=empty, uids=[])
    assert batch.num_rows == 0


@pytest.mark.parametrize(
    ("tokens", "logprobs", "text"),
    [
        ([[1], [10]], [[-1.0], [-1.0]], "token id 10 in the response of row 1; it has to be from 0 to 9"),
        ([[-1], [1]], [[-1.0], [-1.0]], "token id -1 in the response of row 0"),
        ([[1], [1, 1]], [[-1.0], [-1.0, float("nan")]], "log-prob nan in the response of row 1"),
        ([[1], [1]], [[-1.0], [float("-inf")]], "log-prob -inf in the response of row 1"),
        ([[1], [1]], [[0.5], [-1.0]], "log-prob 0.5 in the response of row 0"),
        ([[1]], [[-1.0]], "2, 1, 2, 2"),
    ],
)
def test_what_no_model_can_have_given_is_refused_by_row(tokens, logprobs, text):
    prompts = Ragged.from_rows([[1], [2]], torch.int64)
    with pytest.raises(EngineError, match=text):
        rollout_batch(
            prompts, generations(tokens, logprobs), group_ids=torch.tensor([0, 1]), uids=["a", "b"], vocab_size=10
        )


def test_tokens_without_a_logprob_each_are_refused():
    with pytest.raises(EngineError, match="2 tokens and 1 log-probs"):
        generations([[1, 2]], [[-1.0]])
    empty = Ragged.from_rows([], torch.int64)
    with pytest.raises(EngineError, match="1 finish reasons for 0 rows"):
        Generations(empty, empty, ["stop"], 0)

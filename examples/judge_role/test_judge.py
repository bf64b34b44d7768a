"""Tests of the judge: it fulfils the contracts of a role, and scores as documented."""

import torch
from judge_role import RepetitionWorker

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.testing import check_role
from rlpack.worker import RankContext


def test_the_judge_keeps_its_contracts():
    check_role(RepetitionWorker, arguments={"n": 2, "weight": 0.5})


def test_repetition_in_the_response_counts_and_the_prompt_does_not():
    tokens = Ragged.from_rows([[7, 1, 2, 1, 2, 1, 2], [1, 2, 1, 2], [5, 6]], torch.int64)
    mask = tokens.with_values(torch.tensor([False, *[True] * 6, *[False] * 2, *[True] * 2, *[True] * 2]))
    judge = RepetitionWorker(RankContext(), n=2, weight=2.0)
    scored = judge.score(BatchedDataDict({"input_ids": tokens, "response_mask": mask}))
    torch.testing.assert_close(scored["repeated"], torch.tensor([3 / 5, 0.0, 0.0]))
    torch.testing.assert_close(scored["rewards"], torch.tensor([-6 / 5, 0.0, 0.0]))

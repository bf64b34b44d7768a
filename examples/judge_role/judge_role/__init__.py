"""A custom role for rlpack."""

from judge_role.judge import RepetitionWorker as RepetitionWorker

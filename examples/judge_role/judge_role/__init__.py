"""A custom role for rlpack."""

from judge_role.judge import JudgeWorker as JudgeWorker

"""A role of one's own for rlpack."""

from judge_role.judge import JudgeWorker as JudgeWorker

"""The judge: a scoring role that asks a language model behind an OpenAI-compatible URL.

`roles.judge.target=rlpack.workers.judge:JudgeWorker judge.url=http://localhost:8000/v1 judge.model=name`
"""

import asyncio
import logging
import os
from typing import Self

import torch
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config, Judge
from rlpack.rewards.errors import RewardError
from rlpack.rewards.judge_client import JudgeClient, JudgeSettings, placeholders
from rlpack.rewards.reward_result import Verdict
from rlpack.rewards.scoring import FailureRate, scores_of
from rlpack.worker import RankContext, Worker, sharded
from rlpack.workers.reward import verdict_columns

logger = logging.getLogger(__name__)

_WAYS_OUT = "Look at the judge's server, or raise judge.timeout_s, judge.retries or judge.max_failures"


class JudgeWorker(Worker):
    """One rank that asks the judge; its rewards are added to those of other scoring roles."""

    def __init__(self, context: RankContext, settings: JudgeSettings, weight: float, max_failures: float) -> None:
        super().__init__(context)
        self._settings = settings
        self._weight = weight
        self._rate = FailureRate(max_failures, "judge.max_failures", _WAYS_OUT)

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Read the key from its environment variable; nobody is asked yet."""
        return cls(context, _settings_of(config.judge), config.judge.weight, config.judge.max_failures)

    @sharded(background=True)
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards` f32 [B], `quarantined` bool [B] and the rest of `rlpack.workers.reward.verdict_columns`.

        A reward is the judge's score over `judge.max_score`, times `judge.weight`; `reward_judge` is without the
        weight.

        Args:
            shard: text columns: `prompt`, `completion`, and those that `judge.prompt_template` names.

        Raises:
            RewardError: the server refuses such requests.
            TooManyFailuresError: more rows than may be have no score.
        """
        texts = {name: shard[name] for name in placeholders(self._settings.prompt_template)}
        verdicts, retries = asyncio.run(self._ask(texts, shard.num_rows))
        failures = [f"row {row}: {v.problem} ({v.text})" for row, v in enumerate(verdicts) if v.failed]
        if failures:
            logger.warning(
                "the judge gave %d of %d rows no score; the first, %s", len(failures), shard.num_rows, failures[0]
            )
        self._rate.take(verdicts, failures[0] if failures else "")
        columns = verdict_columns(scores_of({"judge": verdicts}, {"judge": self._weight}), parts=True)
        del columns["reward_output_bytes"]
        attempts = torch.zeros(shard.num_rows, dtype=torch.int64)
        attempts[:1] = retries
        return shard.keep([]).union({**columns, "reward_retries": attempts})

    async def _ask(self, texts: dict[str, list[str]], rows: int) -> tuple[list[Verdict], int]:
        judge = JudgeClient(self._settings, self._rate.allowed(rows))
        return await judge.scores(texts, rows), judge.retries


def api_key(section: Judge) -> str | None:
    """Return the judge's key from its environment variable, None where it needs none.

    Raises:
        RewardError: the variable isn't set.
    """
    if section.api_key_env is None:
        return None
    key = os.environ.get(section.api_key_env)
    if not key:
        raise RewardError(
            f"judge.api_key_env is {section.api_key_env!r}, and there is no such environment variable; set it where "
            "the ranks run, or leave judge.api_key_env=null"
        )
    return key


def _settings_of(section: Judge) -> JudgeSettings:
    """Return how the judge is asked."""
    assert section.url is not None
    assert section.model is not None
    return JudgeSettings(
        url=section.url,
        model=section.model,
        api_key=api_key(section),
        prompt_template=section.prompt_template,
        max_score=section.max_score,
        max_tokens=section.max_tokens,
        concurrency=section.concurrency,
        timeout_s=section.timeout_s,
        retries=section.retries,
        backoff_s=section.backoff_s,
    )

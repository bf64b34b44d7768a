"""The judge: a scoring role that calls a language model behind an OpenAI-compatible URL.

`roles.judge.target=rlpack.workers.judge:JudgeWorker judge.url=http://localhost:8000/v1 judge.model=name`
"""

import asyncio
import logging
from typing import Self

import torch
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config, Judge
from rlpack.rewards.judge_client import JudgeClient, JudgeSettings, api_key, placeholders
from rlpack.rewards.reward_result import RewardResult
from rlpack.rewards.scoring import FailureRate, combine_rewards
from rlpack.worker import TEXT_COLUMNS, RankContext, Worker, sharded
from rlpack.workers.reward import reward_columns

logger = logging.getLogger(__name__)

_HINT = "Check the judge's server, or raise judge.timeout_s, judge.retries or judge.max_failures"


class JudgeWorker(Worker):
    """One rank that calls the judge; its rewards are added to those of the other scoring roles."""

    def __init__(self, context: RankContext, settings: JudgeSettings, weight: float, max_failures: float) -> None:
        super().__init__(context)
        self._settings = settings
        self._weight = weight
        self._failure_rate = FailureRate(max_failures, "judge.max_failures", _HINT)

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Read the API key from its environment variable; no request is sent yet."""
        return cls(context, _settings_of(config.judge), config.judge.weight, config.judge.max_failures)

    @sharded(reads=(TEXT_COLUMNS,), returns=("rewards", "quarantined"), background=True)
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards` f32 [B], `quarantined` bool [B] and further columns (`reward_columns`).

        A reward is the judge's score divided by `judge.max_score`, times `judge.weight`. `reward_judge` f32 [B] is the
        reward without the weight; `reward_retries` int64 [B] is the shard's number of retries, in its first row.

        Args:
            shard: text columns: `prompt`, `completion`, and those that `judge.prompt_template` names.

        Raises:
            RewardError: the server rejects the requests permanently.
            TooManyFailuresError: too many rows have no score.
        """
        texts = {name: shard[name] for name in placeholders(self._settings.prompt_template)}
        results, num_retries = asyncio.run(self._call_judge(texts, shard.num_rows))
        failures = [f"row {row}: {r.problem} ({r.detail})" for row, r in enumerate(results) if r.failed]
        if failures:
            logger.warning(
                "the judge gave no score for %d of %d rows; the first: %s", len(failures), shard.num_rows, failures[0]
            )
        self._failure_rate.record(results, failures[0] if failures else "")
        columns = reward_columns(combine_rewards({"judge": results}, {"judge": self._weight}), by_function=True)
        del columns["reward_output_bytes"]
        retries = torch.zeros(shard.num_rows, dtype=torch.int64)
        retries[:1] = num_retries
        return shard.keep([]).union({**columns, "reward_retries": retries})

    async def _call_judge(self, texts: dict[str, list[str]], num_rows: int) -> tuple[list[RewardResult], int]:
        client = JudgeClient(self._settings, self._failure_rate.allowed(num_rows))
        return await client.score(texts, num_rows), client.num_retries


def _settings_of(section: Judge) -> JudgeSettings:
    assert section.url is not None
    assert section.model is not None
    return JudgeSettings(
        url=section.url,
        model=section.model,
        api_key=api_key(section.api_key_env),
        prompt_template=section.prompt_template,
        max_score=section.max_score,
        max_tokens=section.max_tokens,
        concurrency=section.concurrency,
        timeout_s=section.timeout_s,
        retries=section.retries,
        backoff_s=section.backoff_s,
    )

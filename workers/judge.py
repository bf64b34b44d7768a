"""The judge: a scoring role that calls a language model behind an OpenAI-compatible URL.

`roles.judge.target=rlpack.workers.judge:JudgeWorker judge.url=http://localhost:8000/v1 judge.model=name`
"""

import asyncio
import logging
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config, Judge
from rlpack.rewards.judge_client import JudgeClient, JudgeSettings, placeholders
from rlpack.rewards.request_loop import RequestLoop
from rlpack.rewards.reward_result import RewardResult
from rlpack.rewards.score_requests import RequestSettings, api_key
from rlpack.rewards.scoring import FailureRate, combine_rewards
from rlpack.worker import TEXT_COLUMNS, RankContext, Worker, sharded
from rlpack.workers.reward import reward_columns

logger = logging.getLogger(__name__)

HINT = "Check the server of judge.url, or raise judge.timeout_s, judge.retries or judge.max_failures"


class JudgeWorker(Worker):
    """One rank that calls the judge; its rewards are added to those of the other scoring roles."""

    def __init__(self, context: RankContext, settings: JudgeSettings, weight: float, max_failures: float) -> None:
        super().__init__(context)
        self.background_threads = settings.concurrency  # enough to fill all slots, even by calls of one row
        self._settings = settings
        self._weight = weight
        self._failure_rate = FailureRate(max_failures, "judge.max_failures", HINT)
        self._loop = RequestLoop(settings.concurrency)

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
        allowed = self._failure_rate.allowed(shard.num_rows)

        async def call_judge(slots: asyncio.Semaphore) -> tuple[list[RewardResult], int]:
            client = JudgeClient(self._settings, allowed, slots=slots)
            return await client.score(texts, shard.num_rows), client.num_retries

        results, num_retries = self._loop.run(call_judge)
        columns = score_columns("judge", results, self._weight, num_retries)
        self._failure_rate.record(results, first_failure("the judge", results), allowed)
        return shard.keep([]).union(columns)


def score_columns(name: str, results: list[RewardResult], weight: float, num_retries: int) -> dict[str, Tensor]:
    """Return the columns of a role that calls a server: those of `reward_columns`, and `reward_retries` int64 [B]."""
    columns = reward_columns(combine_rewards({name: results}, {name: weight}), by_function=True)
    del columns["reward_output_bytes"]
    retries = torch.zeros(len(results), dtype=torch.int64)
    retries[:1] = num_retries
    return {**columns, "reward_retries": retries}


def first_failure(scorer: str, results: list[RewardResult]) -> str:
    """Log how many rows have no score, and return the first failure; "" if there is none."""
    failures = [f"row {row}: {result.problem} ({result.detail})" for row, result in enumerate(results) if result.failed]
    if not failures:
        return ""
    counts = (len(failures), len(results))
    logger.warning("%s gave no score for %d of %d rows; the first: %s", scorer, *counts, failures[0])
    return failures[0]


def request_settings(section: Judge) -> RequestSettings:
    """Return how the server of the `judge` section is called.

    Raises:
        RewardError: the environment variable of the API key isn't set.
    """
    assert section.url is not None
    assert section.model is not None
    return RequestSettings(
        url=section.url,
        model=section.model,
        api_key=api_key(section.api_key_env),
        concurrency=section.concurrency,
        timeout_s=section.timeout_s,
        retries=section.retries,
        backoff_s=section.backoff_s,
    )


def _settings_of(section: Judge) -> JudgeSettings:
    return JudgeSettings(
        **vars(request_settings(section)),
        prompt_template=section.prompt_template,
        max_score=section.max_score,
        max_tokens=section.max_tokens,
    )

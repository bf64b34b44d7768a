"""The served reward model: a scoring role that calls a reward model served by vLLM, as by `rlpack serve`.

`roles.judge.target=rlpack.workers.served_reward_model:ServedRewardModelWorker judge.url=http://localhost:8000/v1
judge.model=name`
"""

import asyncio
from typing import Self

from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config
from rlpack.rewards.request_loop import RequestLoop
from rlpack.rewards.reward_model_client import RewardModelClient
from rlpack.rewards.reward_result import RewardResult
from rlpack.rewards.score_requests import RequestSettings
from rlpack.rewards.scoring import FailureRate
from rlpack.worker import RankContext, Worker, sharded
from rlpack.workers.judge import HINT, first_failure, request_settings, score_columns


class ServedRewardModelWorker(Worker):
    """One rank that calls the reward model; its rewards are added to those of the other scoring roles."""

    def __init__(
        self,
        context: RankContext,
        settings: RequestSettings,
        weight: float,
        max_failures: float,
        *,
        pad_token_id: int | None = None,
    ) -> None:
        super().__init__(context)
        self.background_threads = settings.concurrency  # enough to fill all slots, even by calls of one row
        self._settings = settings
        self._weight = weight
        self._pad_token_id = pad_token_id
        self._failure_rate = FailureRate(max_failures, "judge.max_failures", HINT)
        self._loop = RequestLoop(settings.concurrency)

    @classmethod
    def from_settings(
        cls,
        context: RankContext,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pad_token_id: int | None = None,
    ) -> Self:
        """Read the API key from its environment variable; no request is sent yet.

        Args:
            context: the rank's place in the pool.
            config: read for `judge`.
            tokenizer: the policy's tokenizer, which the reward model shares.
            pad_token_id: the reward model's padding token (`roles.<role>.arguments.pad_token_id`).
        """
        section = config.judge
        settings = request_settings(section)
        return cls(context, settings, section.weight, section.max_failures, pad_token_id=pad_token_id)

    @sharded(reads=("input_ids",), returns=("rewards", "quarantined"), background=True)
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards` f32 [B], `quarantined` bool [B] and further columns (`reward_columns`).

        A reward is the model's score at the last token that isn't its padding token, times `judge.weight`.
        `reward_served_model` f32 [B] is the score; `reward_retries` int64 [B] is the shard's number of retries, in its
        first row.

        Args:
            shard: `input_ids`, prompts and responses.

        Raises:
            RewardError: the server rejects the requests permanently, or its model has more than one label.
            TooManyFailuresError: too many rows have no score.
        """
        rows = [row.tolist() for row in shard["input_ids"].rows()]
        allowed = self._failure_rate.allowed(len(rows))

        async def call_model(slots: asyncio.Semaphore) -> tuple[list[RewardResult], int]:
            client = RewardModelClient(self._settings, allowed, pad_token_id=self._pad_token_id, slots=slots)
            return await client.score(rows), client.num_retries

        results, num_retries = self._loop.run(call_model)
        columns = score_columns("served_model", results, self._weight, num_retries)
        self._failure_rate.record(results, first_failure("the reward model", results), allowed)
        return shard.keep([]).union(columns)

"""The reward role: scores responses with functions of their texts, run in killable processes."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Self

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.evaluation_sets import COLUMN, set_configs
from rlpack.config.schema import Config, Reward
from rlpack.rewards.pool.call_queue import FunctionSpec, PoolSettings
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.pool.sandbox import unenforced
from rlpack.rewards.scoring import BatchRewards, RewardScorer
from rlpack.worker import TEXT_COLUMNS, RankContext, Worker, sharded

logger = logging.getLogger(__name__)

_SINGLE = "reward"


class RewardWorker(Worker):
    """One rank that scores rows; a user's own scoring role has the same `score`."""

    def __init__(
        self,
        context: RankContext,
        settings: Reward,
        hidden: Sequence[str] = (),
        of_sets: Mapping[str, Reward] = MappingProxyType({}),
    ) -> None:
        """Start the processes that load the reward functions; they can't read the paths in `hidden`.

        `of_sets` maps names of evaluation sets to their `reward` sections; the processes of a set start when its first
        rows arrive.
        """
        super().__init__(context)
        self._hidden, self._of_sets, self._set_scorers = hidden, of_sets, dict[str, RewardScorer]()
        self._starting = Lock()
        self._has_several = bool(settings.functions)
        self._scorer = _scorer(settings, hidden)
        if settings.sandbox == "strict":  # fail before the run starts if the kernel can't provide the strict sandbox
            self._scorer.wait()
        elif context.rank == 0 and (missing := unenforced(processes=settings.subprocesses > 0)):
            logger.warning("reward.sandbox=limits is incomplete on this machine: functions can %s", "; ".join(missing))

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Start the processes that load the reward functions."""
        hidden = [path for path in (config.run_dir, config.job.secrets_dir) if path]
        of_sets = {
            name: of_set.reward
            for name, of_set in set_configs(config).items()
            if config.evaluation.sets[name].reward_function is not None
        }
        return cls(context, config.reward, hidden, of_sets)

    def close(self) -> None:
        """End the processes; without this call they end with the rank's process."""
        for scorer in (self._scorer, *self._set_scorers.values()):
            scorer.close()

    @sharded(reads=("input_ids", "response_mask", TEXT_COLUMNS), returns=("rewards", "quarantined"), background=True)
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards` f32 [B], `quarantined` bool [B] and the other columns of `reward_columns`.

        Args:
            shard: text columns: `prompt`, `completion` and the dataset's (`answer`, for example). A session also sends
                `input_ids` and `response_mask`, for roles that read tokens.
        """
        texts = shard.keep(shard.names_of("list"))
        is_of_set = COLUMN in texts and shard.num_rows > 0  # the rows of a call are of one set
        scorer = self._scorer_of(texts[COLUMN][0]) if is_of_set else self._scorer
        rewards = scorer.score(texts, shard.num_rows)
        return shard.keep([]).union(reward_columns(rewards, by_function=self._has_several and COLUMN not in texts))

    def _scorer_of(self, name: str) -> RewardScorer:
        """Return the scorer of an evaluation set; safe to call concurrently."""
        with self._starting:
            if name not in self._set_scorers:
                self._set_scorers[name] = _scorer(self._of_sets[name], self._hidden)
            return self._set_scorers[name]


def _scorer(settings: Reward, hidden: Sequence[str]) -> RewardScorer:
    """Start the processes of reward functions."""
    weights = {name: function.weight for name, function in settings.functions.items()} or {_SINGLE: 1.0}
    pool = _pool_settings(settings, hidden)
    return RewardScorer(function_specs(settings), weights, pool, max_failures=settings.max_failures)


def function_specs(settings: Reward) -> dict[str, FunctionSpec]:
    """Return the functions of a run by name: `reward.functions`, or the single `reward.function`."""
    if not settings.functions:
        return {_SINGLE: FunctionSpec(settings.function, settings.arguments, settings.timeout_s)}
    return {
        name: FunctionSpec(
            function.function,
            function.arguments,
            settings.timeout_s if function.timeout_s is None else function.timeout_s,
            f"reward.functions.{name}.function",
        )
        for name, function in settings.functions.items()
    }


def reward_columns(rewards: BatchRewards, *, by_function: bool) -> dict[str, Tensor]:
    """Return the columns that a scoring role returns.

    - `rewards`: f32 [B].
    - `quarantined`: whether the row has no finite reward, bool [B].
    - `reward_failure`: 0 or the kind of failure (`rlpack.rewards.scoring.BatchRewards.failures`), int64 [B].
    - `reward_output_bytes`: bytes that functions wrote for the whole shard, stored in its first row, int64 [B].
    - `reward_<name>`, with `by_function`: rewards of each function, NaN where it gave no number, f32 [B].
    """
    output_bytes = rewards.failures.new_zeros(rewards.failures.shape)
    output_bytes[:1] = rewards.output_bytes
    return {
        "rewards": rewards.values,
        "quarantined": rewards.quarantined,
        "reward_failure": rewards.failures,
        "reward_output_bytes": output_bytes,
        **({f"reward_{name}": values for name, values in rewards.by_function.items()} if by_function else {}),
    }


def _pool_settings(settings: Reward, hidden: Sequence[str]) -> PoolSettings:
    return PoolSettings(
        processes=settings.processes,
        rows_per_call=settings.rows_per_call,
        batch_timeout_s=settings.batch_timeout_s,
        strict=settings.sandbox == "strict",
        env_vars=settings.env_vars,
        hidden=tuple(map(Path, hidden)),
        limits=Limits(memory_gb=settings.memory_gb, processes=settings.subprocesses),
    )

"""The reward role: scores responses by functions of their texts, in processes that can be ended at any moment."""

from typing import Self

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config, Reward
from rlpack.rewards.pool.call_queue import PoolSettings, Target
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.scoring import Scorer, Scores
from rlpack.worker import RankContext, Worker, sharded

_ONLY = "reward"


class RewardWorker(Worker):
    """One rank that scores rows; a user's own judge derives from it or from `Worker` and has the same `score`."""

    def __init__(self, context: RankContext, settings: Reward) -> None:
        super().__init__(context)
        functions = settings.functions
        self._has_parts = bool(functions)
        weights = {name: function.weight for name, function in functions.items()} or {_ONLY: 1.0}
        self._scorer = Scorer(targets_of(settings), weights, _pool_of(settings), max_failures=settings.max_failures)
        if settings.sandbox == "strict":  # whether it can be had is said before the run begins
            self._scorer.wait()

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Start the processes that load the reward functions."""
        return cls(context, config.reward)

    def close(self) -> None:
        """End the processes; they end with this one anyway."""
        self._scorer.close()

    @sharded(background=True)
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards` f32 [B] and `quarantined` bool [B] (there is no finite reward for the row).

        With them come the columns of `verdict_columns`.

        Args:
            shard: text columns: `prompt`, `completion`, and whatever the dataset brought (`answer`, say). A session
                sends `input_ids` and `response_mask` too, for a judge that reads tokens.
        """
        texts = shard.keep(shard.names_of("list"))
        return shard.keep([]).union(verdict_columns(self._scorer.score(texts, shard.num_rows), parts=self._has_parts))


def targets_of(settings: Reward) -> dict[str, Target]:
    """Return the functions that a run scores by: those of `reward.functions`, or the one of `reward.function`."""
    if not settings.functions:
        return {_ONLY: Target(settings.function, settings.arguments, settings.timeout_s)}
    return {
        name: Target(
            function.function,
            function.arguments,
            settings.timeout_s if function.timeout_s is None else function.timeout_s,
            f"reward.functions.{name}.function",
        )
        for name, function in settings.functions.items()
    }


def _pool_of(settings: Reward) -> PoolSettings:
    return PoolSettings(
        processes=settings.processes,
        rows_per_call=settings.rows_per_call,
        batch_timeout_s=settings.batch_timeout_s,
        strict=settings.sandbox == "strict",
        environment=settings.env_vars,
        limits=Limits(memory_gb=settings.memory_gb, processes=settings.subprocesses),
    )


def verdict_columns(scores: Scores, *, parts: bool) -> dict[str, Tensor]:
    """Return what a scoring role gives back, by column.

    Those are `rewards` f32 [B] and `quarantined` bool [B]; `reward_failure` int64 [B], 0 or which failure it was
    (`rlpack.rewards.scoring.Scores`); `reward_output_bytes` int64 [B], on the first row, what the functions of all
    rows wrote; and with `parts`, `reward_<name>` f32 [B] for each function, NaN where it gave no number.
    """
    written = scores.failures.new_zeros(scores.failures.shape)
    written[:1] = scores.output_bytes
    return {
        "rewards": scores.values,
        "quarantined": scores.quarantined,
        "reward_failure": scores.failures,
        "reward_output_bytes": written,
        **({f"reward_{name}": part for name, part in scores.parts.items()} if parts else {}),
    }

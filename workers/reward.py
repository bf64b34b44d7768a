"""The reward role: scores responses by a function of their texts."""

from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from rlpack.config.schema import Config, Reward
from rlpack.data.batch import BatchedDataDict
from rlpack.rewards.scoring import call_reward, resolve
from workers.base import RankContext, Worker, sharded


class RewardWorker(Worker):
    """One rank that scores rows; a user's own judge derives from it or from `Worker` and has the same `score`."""

    def __init__(self, context: RankContext, settings: Reward) -> None:
        super().__init__(context)
        self._function = resolve(settings.function)
        self._arguments: dict[str, Any] = settings.arguments

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Import the reward function."""
        return cls(context, config.reward)

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards` f32 [B] and `quarantined` bool [B] (the function gave no finite number for the row).

        Args:
            shard: text columns: `prompt`, `completion`, and whatever the dataset brought (`answer`, say). A session
                sends `input_ids` and `response_mask` too, for a judge that reads tokens.
        """
        columns = shard.keep([name for name in shard.names_of("list") if name not in {"prompt", "completion"}])
        scores = call_reward(self._function, shard["prompt"], shard["completion"], columns, self._arguments)
        return shard.keep([]).union({"rewards": scores.values, "quarantined": scores.quarantined})

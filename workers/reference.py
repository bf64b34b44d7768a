"""The reference role: the frozen policy that the KL term compares with."""

from pathlib import Path
from typing import Self

from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config
from rlpack.models.weight_stream import load_folder
from rlpack.worker import RankContext, Worker, broadcast, sharded
from rlpack.workers.build import build_policy
from rlpack.workers.inference import Scorer


class ReferenceWorker(Worker):
    """One data-parallel rank of the frozen policy."""

    def __init__(self, context: RankContext, scorer: Scorer) -> None:
        super().__init__(context)
        self._scorer = scorer

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Build and shard the policy, and freeze its weights."""
        policy = build_policy(config, "reference", tokenizer, context)
        scorer = Scorer.from_policy(policy.requires_grad_(False), context, config.rollout.temperature, tokenizer)
        return cls(context, scorer)

    @sharded(reads=("input_ids", "response_mask"), returns=("reference_logprobs",))
    def logprobs(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return the column `reference_logprobs` f32 [T], 0 outside responses.

        Args:
            shard: `input_ids`, `response_mask`.
        """
        return self._scorer.logprobs(shard, "reference_logprobs")

    @broadcast
    def load_model(self, folder: str) -> None:
        """Load the weights of a model folder: the policy that the recipe started from."""
        load_folder(self._scorer.policy, Path(folder))

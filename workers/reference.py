"""The reference: the frozen policy that the KL term compares with."""

from typing import Self

from transformers import PreTrainedTokenizerBase

from rlpack.algorithms.aggregation import row_sums
from rlpack.algorithms.kl import KLEstimator, kl_estimate
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config
from rlpack.models.parallel import load_full_state_dict
from rlpack.worker import RankContext, Worker, broadcast, sharded
from rlpack.workers.build import build_policy, read_weights
from rlpack.workers.inference import Scorer


class ReferenceWorker(Worker):
    """One data-parallel rank of the frozen policy."""

    def __init__(self, context: RankContext, scorer: Scorer, estimator: KLEstimator = "k3") -> None:
        super().__init__(context)
        self._scorer = scorer
        self._estimator: KLEstimator = estimator

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Build and shard the policy; nothing in it is trained."""
        policy = build_policy(config, "reference", tokenizer, context)
        scorer = Scorer.of(policy.requires_grad_(False), context, config.rollout.temperature, tokenizer)
        return cls(context, scorer, config.algorithm.kl_estimator)

    @sharded()
    def logprobs(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return the column `reference_logprobs`, and `kl_sum` f64 [B]: each response's divergence from the reference.

        Args:
            shard: `input_ids`, `response_mask`, and the policy's `logprobs`; without these there is no `kl_sum`.
        """
        scored = self._scorer.logprobs(shard, "reference_logprobs")
        if "logprobs" not in shard:
            return scored
        mask, own = shard["response_mask"], shard["logprobs"].values
        kl = kl_estimate(own, scored["reference_logprobs"].values, self._estimator, mask=mask.values)
        return scored.union({"kl_sum": row_sums(kl, mask)})

    @broadcast
    def load_model(self, folder: str) -> None:
        """Take over the weights of a model folder, the policy that a recipe began with."""
        load_full_state_dict(self._scorer.policy, read_weights(folder))

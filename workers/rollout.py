"""The rollout role: samples responses with its own copy of the policy."""

from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import Bucket
from rlpack.config.roles import longest_rollout
from rlpack.config.schema import Config
from rlpack.models.weight_stream import WeightLayout
from rlpack.rollout.assemble import assemble
from rlpack.rollout.bucket_receiver import BucketReceiver
from rlpack.rollout.canary import CANARY_LENGTH, CanaryTolerance, canary_tolerance, check_canary
from rlpack.rollout.engine import Engine, engine_class
from rlpack.rollout.types import SamplingParams, TrajectoryBatch
from rlpack.worker import RankContext, Worker, broadcast, rank_zero, sharded

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RolloutWorker(Worker):
    """One rank of a generation engine."""

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        canary_tolerance: CanaryTolerance,
    ) -> None:
        """Wrap an engine; `canary_tolerance` bounds the differences from the trainer's log-probs."""
        super().__init__(context)
        self._engine = engine
        self._tokenizer = tokenizer
        self._canary_tolerance = canary_tolerance
        self._received = BucketReceiver("rollout")

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Build the engine that `rollout.engine` names; the actor's weights reach it before the first call."""
        build = engine_class(config.rollout.engine).from_settings
        dtype = config.rollout.dtype or config.actor.precision
        engine = build(
            config.model,
            config.rollout.model_copy(update={"dtype": dtype}),
            tokenizer,
            device=context.torch_device,
            seed=config.seed,
            max_length=max(longest_rollout(config), CANARY_LENGTH),
        )
        tolerance = canary_tolerance(engine.dtype, _DTYPES[config.actor.precision])
        return cls(context, engine, tokenizer, canary_tolerance=tolerance)

    @sharded(
        reads=("input_ids", "seeds", "group_ids", "uid"),
        returns=(
            *("input_ids", "response_mask", "rollout_logprobs", "policy_version", "response_lengths"),
            *("finish_reason", "completion", "group_ids", "uid"),
        ),
    )
    def generate(self, shard: BatchedDataDict, params: SamplingParams) -> BatchedDataDict:
        """Sample one response for each row.

        Args:
            shard: `input_ids`, the prompts; `seeds` int64 [B], the random seed of each row; `group_ids` and `uid`.
            params: how tokens are sampled.

        Returns:
            The columns of `rlpack.rollout.assemble.assemble`, and `completion`, the response as text.

        Raises:
            EngineError: an update of the weights is under way or failed.
        """
        self._received.check_usable()
        generations = self._engine.generate(shard["input_ids"], params, shard["seeds"].numpy())
        columns = assemble(
            TrajectoryBatch.single_turn(shard["input_ids"], generations),
            group_ids=shard["group_ids"],
            uids=shard["uid"],
            vocab_size=self._engine.vocab_size,
            policy_version=self._engine.policy_version,
        )
        # Row by row: batch_decode returns one empty text for no rows, and a rank may have none.
        texts = [self._tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in generations.token_ids.rows()]
        return shard.keep([]).union(dict(columns) | {"completion": texts})

    @rank_zero
    def weights_dtype(self) -> torch.dtype:
        """Return the dtype in which the engine receives weights."""
        return self._engine.dtype

    @broadcast
    def check_weights(self, layout: WeightLayout) -> None:
        """Check that weights of this layout fit the engine.

        Raises:
            EngineError: a name or a shape does not fit.
        """
        self._engine.check_weights(layout)
        self._received.open(len(layout))

    @broadcast
    def load_bucket(self, bucket: Bucket, version: int) -> None:
        """Check one bucket of the actor's weights and copy it into the engine.

        Raises:
            EngineError: it is not the bucket that is due or was damaged, so nothing is copied; or the engine failed.
        """
        with self._received.receive(bucket, version) as weights:
            self._engine.load_bucket(weights)

    @broadcast
    def publish(self, expected: np.ndarray, token_ids: Tensor, version: int) -> float:
        """Check that all buckets arrived, and the canary; then sample with them as policy version `version`.

        Args:
            expected: the trainer's log-probs of the canary, f32 [R, L].
            token_ids: the canary, int64 [R, L].
            version: number of weight publications, this one included.

        Returns:
            The largest difference between the engine's and the trainer's log-probs, in nats.

        Raises:
            EngineError: a bucket has not arrived.
            CanaryError: the largest or the mean difference exceeds its tolerance.
        """
        self._received.check_complete(version)
        self._engine.finish_update()
        gap = check_canary(
            self._engine.logprobs(token_ids),
            torch.tensor(expected),
            token_ids,
            tolerance=self._canary_tolerance,
            version=version,
        )
        self._engine.policy_version = version
        self._received.close()
        return gap

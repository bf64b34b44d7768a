"""The rollout role: samples responses with its own copy of the policy."""

from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config
from rlpack.data.tokenization import pad_id
from rlpack.rollout.assemble import assemble
from rlpack.rollout.engine import Engine
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import SamplingParams, TrajectoryBatch
from rlpack.worker import RankContext, Worker, broadcast, sharded
from rlpack.workers.build import build_model, to_tensors

# What `rollout.engine` names.
ENGINES = {"hf": HFEngine}


class RolloutWorker(Worker):
    """One rank of generation engines."""

    def __init__(
        self, context: RankContext, engine: Engine, tokenizer: PreTrainedTokenizerBase, vocab_size: int
    ) -> None:
        super().__init__(context)
        self._vocab_size = vocab_size
        self._engine = engine
        self._tokenizer = tokenizer

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Build the engine; weights reach it from the actor before the first call."""
        model = build_model(config.model, tokenizer, context, seed=config.seed, attention_name="sdpa")
        build = ENGINES[config.rollout.engine]
        engine = build(model, pad_token_id=pad_id(tokenizer), max_num_seqs=config.rollout.max_num_seqs)
        return cls(context, engine, tokenizer, model.config.get_text_config().vocab_size)

    @sharded(
        reads=("input_ids", "seeds", "group_ids", "uid"),
        returns=(
            *("input_ids", "response_mask", "rollout_logprobs", "response_lengths"),
            *("finish_reason", "completion", "group_ids", "uid"),
        ),
    )
    def generate(self, shard: BatchedDataDict, params: SamplingParams) -> BatchedDataDict:
        """Sample one response for each row.

        Args:
            shard: `input_ids`, the prompts; `seeds` int64 [B], the randomness of each row; `group_ids` and `uid`.
            params: how tokens are drawn.

        Returns:
            The columns of `rlpack.rollout.assemble.assemble`, and `completion`, the response as text.
        """
        generations = self._engine.generate(shard["input_ids"], params, shard["seeds"].numpy())
        columns = assemble(
            TrajectoryBatch.single_turn(shard["input_ids"], generations),
            group_ids=shard["group_ids"],
            uids=shard["uid"],
            vocab_size=self._vocab_size,
        )
        # Row by row: batch_decode makes one empty text of no rows, and a rank may have none.
        texts = [self._tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in generations.token_ids.rows()]
        return shard.keep([]).union(dict(columns) | {"completion": texts})

    @broadcast
    def load_weights(self, weights: dict[str, np.ndarray], version: int) -> None:
        """Take over the actor's weights; `version` is the count of its optimizer steps."""
        self._engine.load_weights(to_tensors(weights), version)

"""The reward-model role: a sequence classifier with one label, batched like the other model roles."""

from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict, MicrobatchView
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Config
from rlpack.data.tokenization import pad_id
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.inputs import to_model_inputs
from rlpack.worker import RankContext, Worker, sharded
from rlpack.workers.build import build_reward_model
from rlpack.workers.inference import compute_per_token


class RewardModelWorker(Worker):
    """One data-parallel rank of the classifier (FSDP2), which is not trained."""

    def __init__(self, context: RankContext, model: ScalarHeadModel, weight: float, *, pad_token_id: int) -> None:
        super().__init__(context)
        self._model = model.eval()
        self._weight = weight
        self._pad_token_id = pad_token_id

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Load and shard the classifier, and check that packing isolates its sequences."""
        model = build_reward_model(config, tokenizer, context)
        return cls(context, model.requires_grad_(False), config.reward_model.weight, pad_token_id=pad_id(tokenizer))

    @sharded(reads=("input_ids", "response_mask"), returns=("rewards", "quarantined"))
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards` f32 [B], the weighted score of each row, and `quarantined` bool [B].

        As in transformers, a row's score is read at its last token that isn't the classifier's padding token. If the
        end-of-sequence token also serves as padding, that is the token before it. Rows without tokens, or whose score
        is not finite, are quarantined.

        Args:
            shard: `input_ids`, prompts and responses; `response_mask`.
        """
        token_scores = compute_per_token(shard, "scores", self._model, self._token_scores)["scores"]
        has_tokens = token_scores.lengths > 0
        last_tokens = token_scores.lengths.cumsum(0) - token_scores.lengths + self._last_positions(shard["input_ids"])
        scores = torch.full((shard.num_rows,), torch.nan)
        scores[has_tokens] = token_scores.values[last_tokens[has_tokens]]
        rewards = self._weight * scores
        quarantined = ~rewards.isfinite()
        return shard.keep([]).union({"rewards": rewards.where(~quarantined, 0.0), "quarantined": quarantined})

    def _last_positions(self, tokens: Ragged) -> Tensor:
        """Return the position in each row of its last token that isn't padding, int64 [B]; 0 if all are."""
        pad = self._model.model.config.get_text_config().to_dict().get("pad_token_id")
        positions = torch.cat([torch.arange(length) for length in tokens.lengths.tolist()] or [torch.zeros(0).long()])
        counted = positions if pad is None else positions.where(tokens.values.cpu() != pad, 0)
        rows = torch.repeat_interleave(torch.arange(tokens.num_rows), tokens.lengths.cpu())
        return torch.zeros(tokens.num_rows, dtype=torch.int64).scatter_reduce(0, rows, counted, "amax")

    def _token_scores(self, view: MicrobatchView) -> Tensor:
        """Return the classifier's output at each token of a microbatch, f32 [T], on the CPU."""
        inputs = to_model_inputs(view, device=self.context.torch_device, pad_token_id=self._pad_token_id)
        return self._model(inputs, before_token=False).cpu()

"""Log-probabilities of a shard's tokens: what the actor and the reference both do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict, MicrobatchView
from rlpack.data.tokenisation import pad_id
from rlpack.distributed.context import RankContext
from rlpack.models.inputs import to_model_inputs
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard
from rlpack.models.policy import Policy


@dataclass(frozen=True)
class Scorer:
    """A policy and how it reads tokens.

    Attributes:
        policy: the model, sharded over the pool or not.
        device: where it lives.
        temperature: the temperature that responses were sampled at.
        pad_token_id: what fills the slots without a token.
    """

    policy: Policy
    device: torch.device
    temperature: float
    pad_token_id: int

    @classmethod
    def of(cls, policy: Policy, context: RankContext, temperature: float, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the scorer of a rank's policy."""
        return cls(policy, context.torch_device, temperature, pad_id(tokenizer))

    @torch.no_grad()
    def score(self, view: MicrobatchView, *, temperature: float) -> Tensor:
        """Return the log-probs of a microbatch's response tokens, zero elsewhere: f32 [T], on the CPU."""
        self.policy.eval()
        inputs = to_model_inputs(view, device=self.device, pad_token_id=self.pad_token_id)
        select = view.rows["response_mask"].values.to(self.device)
        return self.policy(inputs, select=select, temperature=temperature, entropy=False).logprobs.float().cpu()

    def logprobs(self, shard: BatchedDataDict, name: str, *, temperature: float | None = None) -> BatchedDataDict:
        """Return the column `name`: log p(token | tokens before it) of response tokens, f32, zero elsewhere.

        Rows are in the shard's order.
        """
        chosen = self.temperature if temperature is None else temperature
        return per_token(shard, name, self.policy, lambda view: self.score(view, temperature=chosen))


@torch.no_grad()
def per_token(
    shard: BatchedDataDict, name: str, model: PackedModel, score: Callable[[MicrobatchView], Tensor]
) -> BatchedDataDict:
    """Return the column `name`, f32 [T], of what `score` says of each microbatch; rows in the shard's order.

    Every rank walks the same number of microbatches, fillers included, so no collective waits for another rank.

    Args:
        shard: `response_mask`, and what `score` reads.
        name: of the column.
        model: what is run; its gathered weights are freed at the end.
        score: from a microbatch to a number for each of its tokens, f32 [T], on the CPU.
    """
    values, order = [torch.zeros(0)], [np.zeros(0, dtype=np.int64)]
    for step in range(shard.num_steps):
        for view in shard.microbatches(step):
            values.append(score(view))
            order.append(view.index)
    reshard(model)
    scored = shard.keep(["response_mask"]).select(np.concatenate(order))
    column = scored["response_mask"].with_values(torch.cat(values))
    return shard.keep([]).restore([scored.keep([]).union({name: column})])

"""Forward passes over a shard without gradients: log-probabilities, and any other column of one value per token.

All ranks run the same number of microbatches, dummy ones included, so no collective waits forever.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict, MicrobatchView
from rlpack.data.tokenization import pad_id
from rlpack.distributed.context import RankContext
from rlpack.models.inputs import equal_rows, to_model_inputs
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard
from rlpack.models.pipeline_schedule import forward_turns
from rlpack.models.policy import Policy, TokenScores
from rlpack.spans import span
from rlpack.workers.step_routing import RecordedRouting


@dataclass(frozen=True)
class Scorer:
    """A policy with the settings of its forward pass.

    Attributes:
        policy: the model, sharded over the pool or not.
        device: the model's device.
        temperature: the sampling temperature of rollouts.
        pad_token_id: fills the slots without a token.
    """

    policy: Policy
    device: torch.device
    temperature: float
    pad_token_id: int

    @classmethod
    def from_policy(
        cls, policy: Policy, context: RankContext, temperature: float, tokenizer: PreTrainedTokenizerBase
    ) -> Self:
        """Return the scorer of a rank's policy."""
        return cls(policy, context.torch_device, temperature, pad_id(tokenizer))

    @torch.no_grad()
    def score(self, view: MicrobatchView, *, temperature: float) -> Tensor:
        """Return the log-probs of a microbatch's response tokens, 0 elsewhere: f32 [T], on the CPU."""
        return self._token_scores(view, temperature, entropy=False).logprobs.float().cpu()

    @torch.no_grad()
    def score_with_entropy(self, view: MicrobatchView, *, temperature: float) -> Tensor:
        """Return log-probs and entropies of a microbatch's response tokens, 0 elsewhere: f32 [T, 2], on the CPU."""
        return torch.stack(self._token_scores(view, temperature, entropy=True), 1).float().cpu()

    def _token_scores(self, view: MicrobatchView, temperature: float, *, entropy: bool) -> TokenScores:
        """Score the response tokens of a microbatch."""
        self.policy.eval()
        inputs = to_model_inputs(view, device=self.device, pad_token_id=self.pad_token_id)
        select = view.rows["response_mask"].values.to(self.device)
        return self.policy(inputs, select=select, temperature=temperature, entropy=entropy)

    @torch.no_grad()
    def score_rows(self, token_ids: Tensor) -> Tensor:
        """Return log p(token | tokens before it) at temperature 1, f32 [R, L] on the CPU; a collective.

        Args:
            token_ids: int64 [R, L], without padding. Without context parallelism nothing is packed, so the result is
                right even for a model that does not isolate packed sequences.
        """
        self.policy.eval()
        inputs = equal_rows(token_ids).to(self.device)
        logprobs = self.policy.shared(self.policy(inputs, temperature=1.0, entropy=False).logprobs)
        reshard(self.policy)
        return logprobs.float().cpu().view(token_ids.shape)

    def logprobs(self, shard: BatchedDataDict, name: str, *, temperature: float | None = None) -> BatchedDataDict:
        """Return log-probs of response tokens as the column `name`, f32 [T].

        Entry t is log p(token t | tokens before it), 0 outside responses. Rows are in the shard's order. Without a
        temperature, the sampling temperature of rollouts is used.
        """
        resolved = self.temperature if temperature is None else temperature
        return compute_per_token(shard, name, self.policy, lambda view: self.score(view, temperature=resolved))

    def logprobs_and_entropies(self, shard: BatchedDataDict, routing: RecordedRouting | None = None) -> BatchedDataDict:
        """Return `logprobs` and `entropies` of response tokens at the sampling temperature, f32 [T] each.

        Args:
            shard: the rows.
            routing: records the experts of all tokens, which the column `routed_experts` [T, L, k] then holds.
        """

        def score(view: MicrobatchView) -> Tensor:
            with nullcontext() if routing is None else routing.microbatch():
                return self.score_with_entropy(view, temperature=self.temperature)

        recorded = (dict) if routing is None else (lambda: {"routed_experts": routing.experts()})
        scored = compute_per_token(shard, "scores", self.policy, score, width=(2,), further=recorded)
        column = scored["scores"]
        logprobs, entropies = column.values.unbind(1)
        return scored.drop(["scores"]).union(
            {"logprobs": column.with_values(logprobs), "entropies": column.with_values(entropies)}
        )


@torch.no_grad()
def compute_per_token(
    shard: BatchedDataDict,
    name: str,
    model: PackedModel,
    score: Callable[[MicrobatchView], Tensor],
    width: tuple[int, ...] = (),
    further: Callable[[], dict[str, Tensor]] = dict,
) -> BatchedDataDict:
    """Return the column `name`, f32 [T, *width], computed microbatch by microbatch; rows stay in the shard's order.

    Args:
        shard: `response_mask`, and the columns that `score` reads.
        name: name of the returned column.
        model: the model that `score` runs; its gathered weights are freed at the end.
        score: maps a microbatch to values per token, f32 [T, *width], on the CPU.
        width: shape of a token's values.
        further: called after the last microbatch; returns the values of further columns in the order of microbatches.
    """
    values, order = [torch.zeros(0, *width)], [np.zeros(0, dtype=np.int64)]
    views = (view for step in range(shard.num_steps) for view in shard.microbatches(step))
    for view, scores in score_microbatches(model, views, score):
        values.append(scores)
        order.append(view.index)
    reshard(model)
    scored = shard.keep(["response_mask"]).select(np.concatenate(order))
    mask = scored["response_mask"]
    columns = {key: mask.with_values(column) for key, column in ({name: torch.cat(values)} | further()).items()}
    return shard.keep([]).restore([scored.keep([]).union(columns)])


def score_microbatches(
    model: PackedModel, views: Iterable[MicrobatchView], score: Callable[[MicrobatchView], Tensor]
) -> Iterator[tuple[MicrobatchView, Tensor]]:
    """Run passes without gradients, in the order of the pipeline schedule; yield microbatches with their scores.

    Args:
        model: the model that `score` runs.
        views: the microbatches; all ranks have the same number.
        score: maps a microbatch to its scores; called once for each of this rank's virtual stages.
    """
    last = 0 if model.stage is None else model.stage.num_virtual - 1
    for view, virtual in forward_turns(views, model.stage):
        with span("forward"), model.virtual_stage(virtual):
            scores = score(view)
        if virtual == last:
            yield view, scores

"""What an actor minimises: losses as sums over tokens, and the figures that are logged beside them.

The column `loss_weight`, fixed by the driver from global denominators, makes the loss of an optimizer step the plain
sum over all microbatches and ranks; `token_weight` = 1 / (tokens of the step) does the same for metrics. Both are
numbers of rows, for each of their response tokens; 0 leaves a row out. So nothing here depends on how rows were
batched.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlpack.algorithms.kl import kl_estimate
from rlpack.algorithms.policy_loss import clipped_policy_loss
from rlpack.config.schema import Algorithm
from rlpack.data.batch import BatchedDataDict
from rlpack.models.policy import TokenScores


class Loss(NamedTuple):
    """A microbatch's part of the loss, and of each metric, as 0-dimensional tensors."""

    value: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """Turns the scores of a microbatch's tokens into its part of the loss."""

    @property
    def temperature(self) -> float:
        """Return the temperature of the distribution whose scores it wants."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether the scores have to hold entropies."""
        ...

    def __call__(self, scores: TokenScores, rows: BatchedDataDict) -> Loss:
        """Return the loss of these rows; `scores` are aligned with the tokens of `rows`."""
        ...


def _of_tokens(rows: BatchedDataDict, name: str, like: Tensor) -> Tensor:
    """Return the column `name`, [T], 0 outside the response, on the device and of the type of `like`.

    A column of rows, [B], holds for all response tokens of a row.
    """
    mask, column = rows["response_mask"], rows[name]
    values = column[mask.segment_ids] if isinstance(column, Tensor) else column.values
    return torch.where(mask.values, values, 0).to(device=like.device, dtype=like.dtype)


@dataclass(frozen=True)
class ClippedPolicy:
    """The clipped policy loss (Schulman et al., 2017; separate bounds: Yu et al., 2025) and its KL term.

    Attributes:
        algorithm: bounds and weights.
        temperature: what responses were sampled at; old and new log-probs are both of that distribution.
        needs_entropy: entropies are logged.
    """

    algorithm: Algorithm
    temperature: float
    needs_entropy: bool = True

    def __call__(self, scores: TokenScores, rows: BatchedDataDict) -> Loss:
        """Return Σ weight · (policy loss + kl_coef · KL) over the response tokens."""
        settings = self.algorithm
        weight, share = (_of_tokens(rows, name, scores.logprobs) for name in ("loss_weight", "token_weight"))
        mask = share > 0
        policy = clipped_policy_loss(
            scores.logprobs,
            _of_tokens(rows, "logprobs", weight),
            _of_tokens(rows, "advantages", weight),
            mask,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )
        policy_loss = (weight * policy.token_losses).sum()
        ratio = policy.ratio.detach()
        metrics = {
            "actor/policy_loss": policy_loss.detach(),
            "actor/entropy": (share * scores.entropy.detach()).sum(),
            "actor/ratio_mean": (share * ratio).sum(),
            "actor/ratio_max": torch.where(mask, ratio, 0).max() if ratio.numel() else ratio.new_zeros(()),
            "actor/clip_low_fraction": (share * policy.clipped_low).sum(),
            "actor/clip_high_fraction": (share * policy.clipped_high).sum(),
        }
        loss = policy_loss
        if settings.kl_coef > 0:
            reference = _of_tokens(rows, "reference_logprobs", weight)
            kl = kl_estimate(scores.logprobs, reference, settings.kl_estimator)
            loss = loss + settings.kl_coef * (weight * kl).sum()
            metrics["actor/kl"] = (share * kl.detach()).sum()
        return Loss(loss, metrics | {"actor/loss": loss.detach()})


@dataclass(frozen=True)
class Imitation:
    """Supervised fine-tuning: the negative log-likelihood of the response tokens, of the model as it is."""

    temperature: float = 1.0
    needs_entropy: bool = False

    def __call__(self, scores: TokenScores, rows: BatchedDataDict) -> Loss:
        """Return -Σ weight · log p."""
        loss = -(_of_tokens(rows, "loss_weight", scores.logprobs) * scores.logprobs).sum()
        return Loss(loss, {"actor/loss": loss.detach()})

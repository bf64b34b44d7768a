"""What an actor minimises: losses as sums over tokens, and the figures that are logged beside them.

The column `loss_weight`, fixed by the driver from global denominators, makes the loss of an optimizer step the plain
sum over all microbatches and ranks; `token_weight` = 1 / (tokens of the step) does the same for metrics. Both are
numbers of rows, for each of their response tokens; 0 leaves a row out. So nothing here depends on how rows were
batched.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlpack.algorithms.kl import kl_estimate
from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens
from rlpack.algorithms.registry import call_with, find_loss
from rlpack.algorithms.statistics import statistics_of
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm
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

    @property
    def needs_statistics(self) -> bool:
        """Whether it has to be given figures of the whole optimizer step, `statistics(tokens of the step)`."""
        ...

    def __call__(self, scores: TokenScores, rows: BatchedDataDict, statistics: dict[str, float] | None = None) -> Loss:
        """Return the loss of these rows; `scores` are aligned with the tokens of `rows`."""
        ...


def counted(rows: BatchedDataDict) -> Tensor:
    """Return the tokens that train, bool [T]: those of responses in rows that weigh anything."""
    mask = rows["response_mask"]
    return mask.values & (rows["loss_weight"] > 0)[mask.segment_ids]


def of_tokens(rows: BatchedDataDict, name: str, like: Tensor) -> Tensor:
    """Return the column `name`, [T], 0 outside the response, on the device and of the type of `like`.

    A column of rows, [B], holds for all response tokens of a row.
    """
    mask, column = rows["response_mask"], rows[name]
    values = column[mask.segment_ids] if isinstance(column, Tensor) else column.values
    return torch.where(mask.values, values, 0).to(device=like.device, dtype=like.dtype)


@dataclass(frozen=True)
class PolicyGradient:
    """The policy loss of `algorithm.loss`, its KL term and its entropy bonus.

    Attributes:
        algorithm: the loss, its bounds and weights.
        temperature: what responses were sampled at; old and new log-probs are both of that distribution.
        needs_entropy: entropies are logged.
    """

    algorithm: Algorithm
    temperature: float
    needs_entropy: bool = True

    def weighing_kl(self, coefficient: float) -> "PolicyGradient":
        """Return this objective with another weight of the KL term."""
        return replace(self, algorithm=self.algorithm.model_copy(update={"kl_coef": coefficient}))

    @cached_property
    def function(self) -> Callable[..., PolicyLoss]:
        """Return the policy loss."""
        return find_loss(self.algorithm.loss, self.algorithm.loss_arguments, dict(self.algorithm))

    @property
    def needs_statistics(self) -> bool:
        """Whether the loss has to be given figures of the whole optimizer step."""
        return statistics_of(self.function) is not None

    def statistics(self, tokens: PolicyTokens) -> dict[str, float]:
        """Return those figures, of all tokens of the step."""
        compute = statistics_of(self.function)
        assert compute is not None
        return compute(tokens, **self.algorithm.loss_arguments)

    def evaluate(self, tokens: PolicyTokens, statistics: dict[str, float] | None = None) -> PolicyLoss:
        """Return the policy loss of tokens; figures of the step that it needs are made of these where none are given.

        Raises:
            AlgorithmError: a setting is outside of its range.
        """
        offered = dict(self.algorithm)
        if self.needs_statistics:
            offered["statistics"] = self.statistics(tokens) if statistics is None else statistics
        return call_with(self.function, tokens, offered=offered, **self.algorithm.loss_arguments)

    def tokens(self, logprobs: Tensor, rows: BatchedDataDict) -> PolicyTokens:
        """Return what the loss reads of these rows, of which `logprobs` are the policy's, [T]."""
        names = ("token_weight", "logprobs", "advantages")
        share, old, advantages = (of_tokens(rows, name, logprobs) for name in names)
        return PolicyTokens(logprobs, old, advantages, share > 0, rows["response_mask"].lengths.to(logprobs.device))

    def __call__(self, scores: TokenScores, rows: BatchedDataDict, statistics: dict[str, float] | None = None) -> Loss:
        """Return Σ weight · (policy loss + kl_coef · KL - entropy_coef · entropy) over the response tokens."""
        settings = self.algorithm
        weight, share = (of_tokens(rows, name, scores.logprobs) for name in ("loss_weight", "token_weight"))
        tokens = self.tokens(scores.logprobs, rows)
        entropy = torch.where(tokens.mask, scores.entropy, 0.0)
        policy = self.evaluate(tokens, statistics)
        policy_loss = (weight * policy.token_losses).sum()
        metrics = {
            "actor/policy_loss": policy_loss.detach(),
            "actor/entropy": (share * entropy.detach()).sum(),
            "actor/ratio_mean": (share * policy.ratio).sum(),
            "actor/ratio_max": policy.ratio.max() if policy.ratio.numel() else policy.ratio.new_zeros(()),
            "actor/clip_low_fraction": (share * policy.clipped_low).sum(),
            "actor/clip_high_fraction": (share * policy.clipped_high).sum(),
        }
        loss = policy_loss
        if settings.kl_coef > 0:
            reference = of_tokens(rows, "reference_logprobs", weight)
            kl = kl_estimate(
                scores.logprobs,
                reference,
                settings.kl_estimator,
                straight_through=settings.kl_straight_through,
                mask=tokens.mask,
            )
            loss = loss + settings.kl_coef * (weight * kl).sum()
            metrics["actor/kl"] = (share * kl.detach()).sum()
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * (weight * entropy).sum()
        return Loss(loss, metrics | {"actor/loss": loss.detach()})


@dataclass(frozen=True)
class Imitation:
    """Supervised fine-tuning: the negative log-likelihood of the response tokens, of the model as it is."""

    temperature: float = 1.0
    needs_entropy: bool = False
    needs_statistics: bool = False

    def __call__(self, scores: TokenScores, rows: BatchedDataDict, statistics: dict[str, float] | None = None) -> Loss:
        """Return -Σ weight · log p; what is logged is the mean over tokens, however the loss weighs them."""
        weight, share = (of_tokens(rows, name, scores.logprobs) for name in ("loss_weight", "token_weight"))
        loss = -(weight * scores.logprobs).sum()
        return Loss(loss, {"actor/loss": -(share * scores.logprobs.detach()).sum()})

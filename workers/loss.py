"""Losses of trained roles: sums over the response tokens of a microbatch, and their metrics.

A loss is a small picklable object that the driver makes and passes to `train_step`. It declares the columns that it
reads, so a new loss needs no change in a role.

The column `loss_weight`, computed on the driver from global denominators, makes the loss of an optimizer step the plain
sum over all microbatches and ranks; `token_weight` = 1 / (tokens of the step) does the same for metrics. Both hold one
number per row, which applies to each of its response tokens; 0 leaves the row out. No loss depends on how rows are
batched. Metrics are named without the role, which `OptimizerStepper` prepends.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlpack.algorithms.correction import lag_masks, mismatch_sums, mismatch_totals
from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.kl import at_bound, kl_estimate
from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens, check_policy_loss
from rlpack.algorithms.registry import call_with, find_loss
from rlpack.algorithms.statistics import concat_tokens, statistics_of
from rlpack.algorithms.value_loss import clipped_value_loss
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm
from rlpack.models.policy import TokenScores
from rlpack.user_code import UserCode

# What every loss reads: tokens, the mask of those that train, and the weights of the rows.
_COMMON = ("input_ids", "response_mask", "loss_weight", "token_weight")


def columns_of(loss: "Loss", learning_rate: float | None = None) -> tuple[str, ...]:
    """Return the columns that a `train_step` with these arguments reads."""
    return loss.reads


def needs_whole_groups(loss: "Loss", learning_rate: float | None = None) -> bool:
    """Whether a `train_step` with these arguments needs all rows of a group in one microbatch."""
    return loss.needs_whole_groups


class Loss(Protocol):
    """What the driver needs to know of the loss that it passes to a role's `train_step`."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Return the columns that the loss reads."""

    @property
    def needs_whole_groups(self) -> bool:
        """Whether all rows of a group have to be in the same microbatch."""
        return False


class MicrobatchLoss(NamedTuple):
    """A microbatch's part of the loss, and of each metric, as 0-dimensional tensors."""

    value: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LogprobLoss(Loss):
    """A loss over log-probabilities of tokens, for `ActorWorker.train_step`.

    Attributes:
        temperature: temperature of the distribution whose log-probs the loss reads.
        needs_entropy: whether the loss reads entropies too.
        replays_routing: whether tokens get the experts of the column `routed_experts`.
    """

    temperature: float = 1.0
    needs_entropy: bool = False
    replays_routing: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the columns that the loss reads."""
        return _COMMON

    @property
    def needs_statistics(self) -> bool:
        """Whether the loss needs statistics of the whole optimizer step, which cost another forward pass."""
        return False

    @abstractmethod
    def __call__(
        self, scores: TokenScores, rows: BatchedDataDict, statistics: dict[str, float] | None = None
    ) -> MicrobatchLoss:
        """Return the loss of a microbatch; `scores` are aligned with the tokens of `rows`."""

    def statistics_inputs(self, logprobs: Tensor, rows: BatchedDataDict) -> Any:
        """Return the part of a microbatch that `statistics` reads, picklable and on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} has needs_statistics, but defines no statistics_inputs")

    def statistics(self, inputs: Sequence[Any]) -> dict[str, float]:
        """Return the statistics of an optimizer step.

        `inputs` holds the result of `statistics_inputs` for each of its microbatches, on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} has needs_statistics, but defines no statistics")


class Moments(NamedTuple):
    """Mean and standard deviation of the advantages of a batch."""

    mean: float
    std: float

    def normalize(self, advantages: Tensor, epsilon: float = 1e-8) -> Tensor:
        """Return advantages minus their mean, divided by their standard deviation plus `epsilon`."""
        return (advantages - self.mean) / (self.std + epsilon)


@dataclass(frozen=True)
class PolicyGradientLoss(LogprobLoss):
    """The policy loss of `algorithm.loss`, its KL term and its entropy bonus.

    Attributes:
        algorithm: the loss, its bounds and weights.
        temperature: the sampling temperature; old and new log-probs are both of that distribution.
        needs_entropy: true, because the mean entropy is a metric.
        advantage_moments: moments by which the advantages are normalized; None leaves them unchanged.
        on_policy: whether this is the only optimizer step on the batch. The old log-probs are then the step's own, and
            the ratio is 1. The column `logprobs` isn't read; the step itself measures `logprob_gap` and `response_kl`,
            and, with `lags`, the totals from which `mismatch/*` are computed.
        responses: number of responses over which the metric `response_kl` is a mean.
        lags: number of lags, from 0, whose mismatch an update without old log-probs measures; 0 measures none.
        newest: the newest policy version, that of lag 0.
    """

    algorithm: Algorithm
    temperature: float = field(kw_only=True)
    needs_entropy: bool = field(default=True, kw_only=True)
    advantage_moments: Moments | None = field(default=None, kw_only=True)
    on_policy: bool = field(default=False, kw_only=True)
    responses: int = field(default=1, kw_only=True)
    lags: int = field(default=0, kw_only=True)
    newest: int = field(default=0, kw_only=True)

    @property
    def measures_gap(self) -> bool:
        """Whether the metric `logprob_gap` compares the step's own log-probs with the sampler's.

        It does so if no pass before the update has. With `correction.bypass`, the sampler's are in `logprobs`.
        """
        return self.on_policy or self.algorithm.correction.skips_old_logprobs

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the columns that the loss reads: with a KL term also the reference's log-probs."""
        reference = ("reference_logprobs",) if self.algorithm.kl_coef > 0 else ()
        versions = ("policy_version",) if self.lags else ()
        old = ("rollout_logprobs", *versions) if self.on_policy else ("logprobs",)
        correction = self.algorithm.correction
        weights = ("importance_weights",) if correction.weights != "none" else ()
        scale = ("importance_scale",) if correction.normalizes else ()
        routing = ("routed_experts",) if self.replays_routing else ()
        return (*_COMMON, *old, "advantages", *weights, *scale, *reference, *routing)

    def with_kl_coef(self, coefficient: float) -> "PolicyGradientLoss":
        """Return this loss with another weight of the KL term."""
        return replace(self, algorithm=self.algorithm.model_copy(update={"kl_coef": coefficient}))

    @cached_property
    def function(self) -> Callable[..., PolicyLoss]:
        """Return the policy loss."""
        return find_loss(self.algorithm.loss, self.algorithm.loss_arguments, dict(self.algorithm))

    @property
    def needs_statistics(self) -> bool:
        """Whether the policy loss declares statistics."""
        return statistics_of(self.function) is not None

    def statistics_inputs(self, logprobs: Tensor, rows: BatchedDataDict) -> PolicyTokens:
        """Return the tokens of a microbatch as the policy loss reads them."""
        return self._tokens(logprobs, rows)

    def statistics(self, inputs: Sequence[PolicyTokens]) -> dict[str, float]:
        """Return the statistics that the policy loss declares, over all tokens of the optimizer step."""
        return self._statistics(concat_tokens(list(inputs)))

    def evaluate(self, tokens: PolicyTokens, statistics: dict[str, float] | None = None) -> PolicyLoss:
        """Return the policy loss of tokens.

        If `statistics` is None, statistics that the loss needs are computed from these tokens.

        Raises:
            AlgorithmError: a setting is out of range, or the result is not one `PolicyLoss` with an entry per token.
        """
        offered = dict(self.algorithm)
        if self.needs_statistics:
            offered["statistics"] = self._statistics(tokens) if statistics is None else statistics
        with UserCode(f"algorithm.loss {self.algorithm.loss!r}", AlgorithmError):
            result = call_with(self.function, tokens, offered=offered, **self.algorithm.loss_arguments)
        return check_policy_loss(result, tokens.mask)

    def __call__(
        self, scores: TokenScores, rows: BatchedDataDict, statistics: dict[str, float] | None = None
    ) -> MicrobatchLoss:
        """Return Σ weight · (policy loss + kl_coef · KL - entropy_coef · entropy) over the response tokens."""
        settings = self.algorithm
        weight, token_weight = (
            response_values(rows, name, scores.logprobs) for name in ("loss_weight", "token_weight")
        )
        tokens = self._tokens(scores.logprobs, rows)
        entropy = torch.where(tokens.mask, scores.entropy, 0.0)
        policy = self.evaluate(tokens, statistics)
        token_losses = policy.token_losses
        if settings.correction.weights != "none":
            token_losses = response_values(rows, "importance_weights", weight) * token_losses
        if settings.correction.normalizes:
            token_losses = response_values(rows, "importance_scale", weight) * token_losses
        loss = policy_loss = (weight * token_losses).sum()
        metrics = {"policy_loss": policy_loss.detach(), "entropy": (token_weight * entropy.detach()).sum()}
        metrics |= _policy_metrics(policy, token_weight)
        if settings.kl_coef > 0:
            kl = self._kl(scores.logprobs, rows, tokens.mask)
            loss = loss + settings.kl_coef * (weight * kl).sum()
            metrics["kl"] = (token_weight * kl.detach()).sum()
            if (bounded := at_bound(kl, settings.kl_estimator, settings.k3_bound)) is not None:
                metrics["kl_bounded_fraction"] = (token_weight * bounded).sum()
            if self.on_policy:
                metrics["response_kl"] = kl.detach().double().sum() / self.responses
        if self.measures_gap:
            sampled = response_values(rows, "rollout_logprobs", weight) if self.on_policy else tokens.old_logprobs
            gap = (tokens.logprobs.detach() - sampled).abs()
            metrics["logprob_gap"] = (token_weight.double() * gap).sum()
        if self.on_policy and self.lags:
            metrics |= self._mismatch(tokens, rows)
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * (weight * entropy).sum()
        return MicrobatchLoss(loss, metrics | {"loss": loss.detach()})

    def _tokens(self, logprobs: Tensor, rows: BatchedDataDict) -> PolicyTokens:
        """Return the tokens of these rows as the policy loss reads them; `logprobs` are the policy's, [T]."""
        token_weight, advantages = (response_values(rows, name, logprobs) for name in ("token_weight", "advantages"))
        old = logprobs.detach() if self.on_policy else response_values(rows, "logprobs", logprobs)
        if self.advantage_moments is not None:
            advantages = self.advantage_moments.normalize(advantages)
        return PolicyTokens(
            logprobs, old, advantages, token_weight > 0, rows["response_mask"].lengths.to(logprobs.device)
        )

    def _mismatch(self, tokens: PolicyTokens, rows: BatchedDataDict) -> dict[str, Tensor]:
        """Return `mismatch_totals` over the trained tokens, and over those of each lag that occurs.

        The names of the latter have the prefix `lag<k>_`.
        """
        own, versions = tokens.logprobs.detach(), rows["policy_version"].values
        sampled = rows["rollout_logprobs"].values.to(own.device)
        found = self.newest - versions[trained_tokens(rows)].unique()  # on the CPU, where the rows are
        mask = rows["response_mask"].to(own.device).with_values(tokens.mask)
        lags = [lag for lag in found.tolist() if 0 <= lag < self.lags]
        parts = lag_masks(mask, versions.to(own.device), self.newest, lags)
        metrics: dict[str, Tensor] = {}
        for prefix, part in {"": mask, **{f"lag{lag}_": part for lag, part in parts.items()}}.items():
            sums = mismatch_sums(own, sampled, part)
            totals = mismatch_totals(sums, part.count_nonzero())
            metrics |= {f"{prefix}{name}": total for name, total in totals.items()}
        return metrics

    def _kl(self, logprobs: Tensor, rows: BatchedDataDict, mask: Tensor) -> Tensor:
        """Return the estimate of the KL divergence from the reference at each token, [T]."""
        settings, reference = self.algorithm, response_values(rows, "reference_logprobs", logprobs)
        return kl_estimate(
            logprobs,
            reference,
            settings.kl_estimator,
            bound=settings.k3_bound,
            straight_through=settings.kl_straight_through,
            mask=mask,
        )

    def _statistics(self, tokens: PolicyTokens) -> dict[str, float]:
        compute = statistics_of(self.function)
        assert compute is not None
        with UserCode(f"the statistics of algorithm.loss {self.algorithm.loss!r}", AlgorithmError):
            return compute(tokens, **self.algorithm.loss_arguments)


@dataclass(frozen=True)
class SFTLoss(LogprobLoss):
    """Supervised fine-tuning: the negative log-likelihood of the response tokens, at temperature 1."""

    def __call__(
        self, scores: TokenScores, rows: BatchedDataDict, statistics: dict[str, float] | None = None
    ) -> MicrobatchLoss:
        """Return -Σ weight · log p; the metric `loss` is the mean over tokens, whatever the weights are."""
        weight, token_weight = (
            response_values(rows, name, scores.logprobs) for name in ("loss_weight", "token_weight")
        )
        loss = -(weight * scores.logprobs).sum()
        return MicrobatchLoss(loss, {"loss": -(token_weight * scores.logprobs.detach()).sum()})


@dataclass(frozen=True)
class ValueLoss(Loss):
    """The critic's squared error of values against returns, for `CriticWorker.train_step`.

    Attributes:
        clip: how far a value may move from the one before the update; None for no bound.
    """

    clip: float | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the columns that the loss reads."""
        return ("input_ids", "response_mask", "loss_weight", "values", "returns")

    def __call__(self, values: Tensor, rows: BatchedDataDict) -> MicrobatchLoss:
        """Return Σ weight · squared error over the response tokens; `values` f32 [T] are the critic's."""
        weight, old, returns = (response_values(rows, name, values) for name in ("loss_weight", "values", "returns"))
        errors = clipped_value_loss(values, old, returns, clip=self.clip)
        inside = trained_tokens(rows)
        loss = (weight * torch.where(inside, errors.token_losses, 0.0)).sum()
        return MicrobatchLoss(
            loss,
            {
                "loss": loss.detach(),
                "value_mean": (weight * torch.where(inside, values.detach(), 0.0)).sum(),
                "clip_fraction": (weight * (errors.clipped & inside)).sum(),
            },
        )


def trained_tokens(rows: BatchedDataDict) -> Tensor:
    """Return which tokens are trained on, bool [T]: the response tokens of rows with a weight above 0."""
    mask = rows["response_mask"]
    return mask.values & (rows["loss_weight"] > 0)[mask.segment_ids]


def response_values(rows: BatchedDataDict, name: str, like: Tensor) -> Tensor:
    """Return the column `name`, [T], 0 outside responses, with the device and dtype of `like`.

    A per-row column, [B], is spread over the response tokens of each row.
    """
    mask, column = rows["response_mask"], rows[name]
    values = column[mask.segment_ids] if isinstance(column, Tensor) else column.values
    return torch.where(mask.values, values, 0).to(device=like.device, dtype=like.dtype, non_blocking=True)


def _policy_metrics(policy: PolicyLoss, token_weight: Tensor) -> dict[str, Tensor]:
    return {
        "ratio_mean": (token_weight * policy.ratio).sum(),
        "ratio_max": policy.ratio.max() if policy.ratio.numel() else policy.ratio.new_zeros(()),
        "clip_low_fraction": (token_weight * policy.clipped_low).sum(),
        "clip_high_fraction": (token_weight * policy.clipped_high).sum(),
    }

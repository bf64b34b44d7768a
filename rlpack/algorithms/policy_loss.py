"""Policy losses: pure functions from the tokens of a microbatch to one loss per token.

A microbatch consists of whole rows. A loss may combine tokens of the same row, but never of different rows, so its
result for a row doesn't depend on batching. A loss that depends on statistics of the whole optimizer step declares them
with `needs_statistics` (rlpack.algorithms.statistics).

Shape letters: T tokens, B rows. r = π / π_old is the ratio of a token, A its advantage. The log-ratio is clamped to
±20, before its exponential overflows; there is no gradient outside.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """The columns of a microbatch that a policy loss reads.

    Outside the mask they may hold any values, even NaN.

    Attributes:
        logprobs: log-probs of the trained policy, with gradient, [T].
        old_logprobs: log-probs of the policy before the batch's first update, [T].
        advantages: one per token, [T].
        mask: sampled tokens, bool [T].
        lengths: number of tokens of each row, int64 [B]; the rows are concatenated.

    Raises:
        AlgorithmError: columns have different shapes, the mask is not bool, or lengths don't add up to T.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        """Check shapes, and set columns to zero outside the mask."""
        columns = (self.logprobs, self.old_logprobs, self.advantages, self.mask)
        shapes = {tuple(column.shape) for column in columns}
        if len(shapes) > 1 or self.mask.dtype != torch.bool:
            raise AlgorithmError(
                f"columns have shapes {sorted(shapes)} and mask dtype {self.mask.dtype}; all must be [T], the mask bool"
            )
        if int(self.lengths.sum()) != self.mask.shape[0]:
            raise AlgorithmError(
                f"lengths add up to {int(self.lengths.sum())}, and there are {self.mask.shape[0]} tokens"
            )
        for name in ("logprobs", "old_logprobs", "advantages"):
            # `where` before any arithmetic: 0 · NaN would still be NaN, in the value and in the gradient.
            object.__setattr__(self, name, torch.where(self.mask, vars(self)[name], 0.0))

    @property
    def rows(self) -> Tensor:
        """Return the row of every token, int64 [T]."""
        count = torch.arange(self.lengths.shape[0], device=self.mask.device)
        return torch.repeat_interleave(count, self.lengths, output_size=self.mask.shape[0])

    @cached_property
    def ratio(self) -> Tensor:
        """Return r, [T]; 1 outside the mask."""
        return _bounded(self.logprobs - self.old_logprobs)

    @cached_property
    def sequence_ratio(self) -> Tensor:
        """Return the geometric mean ratio of each token's row, [T].

        (Π r)^(1/n) over the row's n masked tokens. Its gradient is that of the token's own ratio.
        """
        own = self.logprobs.detach()
        return _bounded(self.row_means(own - self.old_logprobs)) * (self.logprobs - own).exp()

    def row_means(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over the masked tokens of each token's row, [T]; they are 0 outside the mask."""
        sums = values.new_zeros(self.lengths.shape[0])
        counts = sums.index_add(0, self.rows, self.mask.to(sums.dtype))
        return (sums.index_add(0, self.rows, values) / counts.clamp(min=1))[self.rows]


@dataclass(frozen=True)
class PolicyLoss:
    """The result of a policy loss per token; 0 or False outside the mask.

    Attributes:
        token_losses: losses with gradient, to be summed with the weights of `aggregation.row_weights`, [T].
        ratio: new over old probability, before clipping, without gradient, [T]; above 0 in the mask, so a maximum over
            all tokens ignores the others.
        clipped_low: tokens whose gradient the lower bound removed, bool [T].
        clipped_high: tokens whose gradient the upper bound removed, bool [T].
    """

    token_losses: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor

    @classmethod
    def of(cls, tokens: PolicyTokens, losses: Tensor, ratio: Tensor, low: Tensor, high: Tensor) -> "PolicyLoss":
        """Return the result with everything outside the mask set to 0.

        Raises:
            AlgorithmError: `losses` is not [T]; broadcasting it would change the gradient.
        """
        mask = tokens.mask
        _check_shape("losses", losses, mask)
        return cls(torch.where(mask, losses, 0.0), torch.where(mask, ratio.detach(), 0.0), low & mask, high & mask)


def check_policy_loss(result: object, mask: Tensor) -> PolicyLoss:
    """Return the result of a loss, which may be a user's function.

    Args:
        result: what the function returned.
        mask: the mask of the tokens that it was called with, bool [T].

    Raises:
        AlgorithmError: it is not a `PolicyLoss`, or one of its columns is not [T].
    """
    if not isinstance(result, PolicyLoss):
        raise AlgorithmError(f"algorithm.loss returned a {type(result).__name__}; return a PolicyLoss")
    for name, column in vars(result).items():
        _check_shape(name, column, mask)
    return result


def ppo_clip(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None
) -> PolicyLoss:
    """Return `-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A)` per token.

    PPO (Schulman et al. 2017, arXiv:1707.06347) with two separate bounds (clip-higher, DAPO, arXiv:2503.14476). With
    `dual_clip` = c, the loss of a negative advantage is at most `-c·A` (Ye et al. 2020, arXiv:1912.09729), because r is
    unbounded there.

    >>> tokens = PolicyTokens(
    ...     torch.tensor([0.5, 0.5, 0.5]).log(), torch.tensor([0.25, 0.25, 0.5]).log(), torch.tensor([1.0, -1.0, 1.0]),
    ...     torch.tensor([True, True, False]), torch.tensor([3]))
    >>> loss = ppo_clip(tokens, clip_low=0.2, clip_high=0.3)
    >>> loss.token_losses
    tensor([-1.3000,  2.0000,  0.0000])
    >>> loss.clipped_high
    tensor([ True, False, False])

    Args:
        tokens: tokens of the microbatch.
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        dual_clip: upper bound on the ratio for negative advantages, above 1; None for none.

    Raises:
        AlgorithmError: a bound is outside its range.
    """
    return _clipped(tokens, tokens.ratio, clip_low, clip_high, dual_clip)


def gspo(tokens: PolicyTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """Return the GSPO loss per token, which uses the ratio of the whole sequence.

    `-min(s·A, clip(s, 1 - clip_low, 1 + clip_high)·A)` with s = (Π r)^(1/n) of the row (Zheng et al. 2025,
    arXiv:2507.18071). Every token has its row's loss, so with `seq_mean_token_mean` the value and gradient match the
    paper's. This is the paper's GSPO-token form: s has the gradient of the token's own ratio, so advantages may differ
    within a row.

    >>> both = torch.tensor([True, True])
    >>> tokens = PolicyTokens(torch.tensor([2.0, 8.0]).log(), torch.zeros(2), torch.ones(2), both, torch.tensor([2]))
    >>> gspo(tokens, clip_low=0.2, clip_high=9.0).token_losses
    tensor([-4., -4.])
    """
    return _clipped(tokens, tokens.sequence_ratio, clip_low, clip_high, None)


def gmpo(tokens: PolicyTokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLoss:
    """Return `-A·(Π r̂)^(1/n)` over the row's n tokens, with each ratio clipped separately.

    GMPO (Zhao et al. 2025, arXiv:2507.20673): r̂ is at most e^clip_high where A > 0, and at least e^(-clip_low) where A
    < 0, so the bounds are log-ratios. A geometric mean is less sensitive to single ratios than PPO's arithmetic one.
    Every token has its row's loss, so with `seq_mean_token_mean` the value and gradient match the paper's.

    >>> both = torch.tensor([True, True])
    >>> tokens = PolicyTokens(torch.tensor([0.5, 8.0]).log(), torch.zeros(2), torch.ones(2), both, torch.tensor([2]))
    >>> gmpo(tokens, clip_high=torch.tensor(2.0).log().item()).token_losses
    tensor([-1., -1.])

    Args:
        tokens: tokens of the microbatch.
        clip_low: largest decrease of a token's log-prob that counts, if A < 0.
        clip_high: largest increase of a token's log-prob that counts, if A > 0.

    Raises:
        AlgorithmError: a bound is outside its range.
    """
    _check_bounds(clip_low, clip_high, None, lowest_open=False)
    rises, log_ratio = tokens.advantages > 0, tokens.logprobs - tokens.old_logprobs
    clipped = torch.where(rises, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    losses = -_bounded(tokens.row_means(clipped)) * tokens.advantages
    low, high = (log_ratio < -clip_low) & (tokens.advantages < 0), (log_ratio > clip_high) & rises
    return PolicyLoss.of(tokens, losses, tokens.ratio, low, high)


def cispo(tokens: PolicyTokens, *, clip_low: float = 1.0, clip_high: float = 0.28) -> PolicyLoss:
    """Return `-sg(clip(r, 1 - clip_low, 1 + clip_high))·A·log π` per token; sg stops the gradient.

    CISPO (MiniMax-M1, 2025, arXiv:2506.13585, equation 4): the importance weight is clipped, and every token keeps a
    gradient. clip_low = 1 sets no lower bound, as in the paper.

    >>> tokens = PolicyTokens(
    ...     torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0]), torch.ones(2), torch.ones(2, dtype=torch.bool),
    ...     torch.tensor([2]))
    >>> cispo(tokens, clip_high=0.5).token_losses
    tensor([1.0000, 1.5000])
    """
    _check_bounds(clip_low, clip_high, None, lowest_open=False)
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    none = torch.zeros_like(tokens.mask)
    return PolicyLoss.of(tokens, -weight * tokens.advantages * tokens.logprobs, ratio, none, none)


def sapo(tokens: PolicyTokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> PolicyLoss:
    """Return `-(4/τ)·σ(τ·(r - 1))·A` per token, a soft gate in place of clipping.

    SAPO (Gao et al. 2025, arXiv:2511.20347). τ is `tau_positive` where A > 0, else `tau_negative`. At r = 1 the
    gradient is that of r·A.

    >>> tokens = PolicyTokens(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.tensor([True]), torch.tensor([1]))
    >>> sapo(tokens).token_losses
    tensor([-2.])
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not tau > 0:
            raise AlgorithmError(f"{name} is {tau}; set algorithm.loss_arguments.{name} above 0")
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative)
    gate = 4.0 / tau * torch.sigmoid(tau * (tokens.ratio - 1.0))
    none = torch.zeros_like(tokens.mask)
    return PolicyLoss.of(tokens, -gate * tokens.advantages, tokens.ratio, none, none)


def dppo_tv(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.28, max_ratio: float = 20.0
) -> PolicyLoss:
    """Return `-sg(min(r, max_ratio))·A·log π` where the token's probability has moved little, else 0.

    DPPO with the binary total variation (Qi et al. 2026, arXiv:2602.04879); sg stops the gradient. For a token with
    probabilities p under π and q under π_old, the loss is 0 if A > 0 and p - q > clip_high, or A ≤ 0 and q - p >
    clip_low. Low-probability tokens may thus change by large ratios, high-probability tokens only by small ones. In the
    paper, q is the probability under the policy that sampled the token; `algorithm.correction.bypass=true` matches
    that.

    >>> tokens = PolicyTokens(
    ...     torch.tensor([0.02, 0.9, 0.5]).log(), torch.tensor([0.01, 0.5, 0.5]).log(), torch.ones(3),
    ...     torch.ones(3, dtype=torch.bool), torch.tensor([3]))
    >>> dppo_tv(tokens, clip_high=0.2).clipped_high
    tensor([False,  True, False])

    Args:
        tokens: tokens of the microbatch.
        clip_low: largest decrease of a probability, if A ≤ 0.
        clip_high: largest increase of a probability, if A > 0.
        max_ratio: largest weight of a token.

    Raises:
        AlgorithmError: a bound is outside its range.
    """
    change = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    return _within_divergence(tokens, change < -clip_low, change > clip_high, clip_low, clip_high, max_ratio)


def dppo_kl(
    tokens: PolicyTokens, *, clip_low: float = 0.05, clip_high: float = 0.05, max_ratio: float = 20.0
) -> PolicyLoss:
    """Return the loss of `dppo_tv`, bounding the binary KL divergence instead of the change in probability.

    The divergence is q·log(q/p) + (1 - q)·log((1 - q)/(1 - p)), with 1e-8 added to 1 - q and 1 - p. Tokens whose
    probability moved against the sign of A are never masked (Qi et al. 2026, arXiv:2602.04879).

    >>> tokens = PolicyTokens(
    ...     torch.tensor([0.02, 0.9]).log(), torch.tensor([0.01, 0.5]).log(), torch.ones(2),
    ...     torch.ones(2, dtype=torch.bool), torch.tensor([2]))
    >>> dppo_kl(tokens, clip_high=0.05).clipped_high
    tensor([False,  True])
    """
    new, old = tokens.logprobs.detach(), tokens.old_logprobs
    p, q = new.exp(), old.exp()
    divergence = q * (old - new) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    low, high = (divergence > clip_low) & (p < q), (divergence > clip_high) & (p > q)
    return _within_divergence(tokens, low, high, clip_low, clip_high, max_ratio)


def reinforce(tokens: PolicyTokens) -> PolicyLoss:
    """Return `-A·log π` per token (Williams 1992), for one update per batch.

    >>> tokens = PolicyTokens(
    ...     torch.tensor([-2.0]), torch.tensor([-2.0]), torch.tensor([0.5]), torch.tensor([True]), torch.tensor([1]))
    >>> reinforce(tokens).token_losses
    tensor([1.])
    """
    none = torch.zeros_like(tokens.mask)
    return PolicyLoss.of(tokens, -tokens.advantages * tokens.logprobs, tokens.ratio, none, none)


def _clipped(
    tokens: PolicyTokens, ratio: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    _check_bounds(clip_low, clip_high, dual_clip)
    advantages = tokens.advantages
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    value = ratio.detach()
    low, high = (value < 1 - clip_low) & (advantages < 0), (value > 1 + clip_high) & (advantages > 0)
    if dual_clip is not None:
        high |= (value > dual_clip) & (advantages < 0)
    return PolicyLoss.of(tokens, losses, ratio, low, high)


def _within_divergence(
    tokens: PolicyTokens, below: Tensor, above: Tensor, clip_low: float, clip_high: float, max_ratio: float
) -> PolicyLoss:
    """Return the truncated policy gradient of the tokens inside the trust region."""
    _check_bounds(clip_low, clip_high, None, lowest_open=False)
    if not max_ratio > 0:
        raise AlgorithmError(f"max_ratio is {max_ratio}; set algorithm.loss_arguments.max_ratio above 0")
    ratio, rises = tokens.ratio.detach(), tokens.advantages > 0
    low, high = below & ~rises, above & rises
    losses = -ratio.clamp(max=max_ratio) * tokens.advantages * tokens.logprobs
    return PolicyLoss.of(tokens, torch.where(low | high, 0.0, losses), ratio, low, high)


def _check_shape(name: str, column: object, mask: Tensor) -> None:
    """Raise an `AlgorithmError` unless a column of a policy loss is a tensor of the mask's shape."""
    if isinstance(column, Tensor) and column.shape == mask.shape:
        return
    kind = f"a tensor of shape {list(column.shape)}" if isinstance(column, Tensor) else f"a {type(column).__name__}"
    raise AlgorithmError(
        f"algorithm.loss gave {kind} as {name} for {mask.shape[0]} tokens; give one entry per token, of shape "
        f"{list(mask.shape)}, and leave sums and means to algorithm.aggregation"
    )


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None, *, lowest_open: bool = True) -> None:
    """Raise an `AlgorithmError` if the bounds don't define a trust region."""
    if not (0 <= clip_low < 1 or (clip_low == 1 and not lowest_open)):
        raise AlgorithmError(f"clip_low is {clip_low}; set algorithm.clip_low from 0 to below 1")
    if not clip_high >= 0:
        raise AlgorithmError(f"clip_high is {clip_high}; set algorithm.clip_high to 0 or more")
    if dual_clip is not None and not dual_clip > 1:
        raise AlgorithmError(f"dual_clip is {dual_clip}; set algorithm.dual_clip above 1, or to null")

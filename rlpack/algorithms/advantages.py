"""Advantage estimators for whole responses: one advantage per row, from rewards relative to a baseline.

Invariants (tests/unit/algorithms/test_advantages.py); B is the number of rows, G the number of groups:

1. Statistics are computed in float64 per group id, never per prompt text: two equal prompts form two groups.
2. Advantages are exactly 0 in groups that allow no comparison: those with a single row or with equal rewards.
3. Rows that are not `valid` get 0, do not enter the statistics, and may be NaN.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]

# Added to standard deviations by default, in units of the reward.
EPSILON = 1e-6


class _Groups(NamedTuple):
    """Rows sorted into G groups, valid rows only."""

    of_row: Tensor  # int64 [B], group of each row
    sizes: Tensor  # float64 [G]
    means: Tensor  # float64 [G]
    degenerate: Tensor  # bool [G], fewer than two rows, or all rewards equal


def group_relative(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    valid: Tensor | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """Return each reward minus its group's baseline, optionally divided by the group's standard deviation, f32 [B].

    `mean` with `std` is GRPO (Shao et al. 2024, arXiv:2402.03300), `mean` without it Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783), `leave_one_out` without it RLOO (Ahmadian et al. 2024, arXiv:2402.14740). The deviation is the
    unbiased one (n - 1), with `epsilon` added.

    >>> group_relative(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([7, 7, 9]), scale="none")
    tensor([ 0.5000, -0.5000,  0.0000])
    >>> group_relative(torch.tensor([3.0, 0.0, 0.0]), torch.tensor([7, 7, 7]), baseline="leave_one_out", scale="none")
    tensor([ 3.0000, -1.5000, -1.5000])

    Args:
        rewards: one per row, [B].
        group_ids: rows with the same id are samples of one prompt, int64 [B], in any order.
        baseline: `mean` of the group, or `leave_one_out`, the mean of the other rows of the group.
        scale: `std` divides by the group's standard deviation, `none` does not.
        valid: rows to include, bool [B]; None includes all.
        epsilon: added to the standard deviation, in units of the reward.

    Raises:
        AlgorithmError: shapes differ, a name is unknown, or a valid reward is not finite.
    """
    if baseline not in ("mean", "leave_one_out"):
        raise AlgorithmError(f"baseline is {baseline!r}; set algorithm.baseline to mean or leave_one_out")
    if scale not in ("std", "none"):
        raise AlgorithmError(f"scale is {scale!r}; set algorithm.scale to std or none")
    included, values = _checked(rewards, group_ids, valid)
    if rewards.numel() == 0:
        return rewards.float()
    groups = _group(values, group_ids, included)
    centered = values - groups.means[groups.of_row]
    sizes = groups.sizes[groups.of_row]
    advantages = centered
    if baseline == "leave_one_out":
        advantages = centered * sizes / (sizes - 1).clamp(min=1)
    if scale == "std":
        squares = torch.zeros_like(groups.sizes).index_add(0, groups.of_row, torch.where(included, centered**2, 0.0))
        deviations = (squares / (groups.sizes - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviations[groups.of_row] + epsilon)
    return torch.where(included & ~groups.degenerate[groups.of_row], advantages, 0.0).float()


def opo(rewards: Tensor, group_ids: Tensor, response_tokens: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return each reward minus the length-weighted mean reward of its group, f32 [B].

    OPO (Hao et al. 2025, arXiv:2505.23585): if the squared norm of a response's gradient is proportional to its length,
    this baseline minimizes the variance.

    >>> opo(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), torch.tensor([30, 10]))
    tensor([ 0.2500, -0.7500])

    Args:
        rewards: one per row, [B].
        group_ids: rows with the same id are samples of one prompt, int64 [B].
        response_tokens: tokens of each response, int64 [B].
        valid: rows to include, bool [B]; None includes all.

    Raises:
        AlgorithmError: shapes differ, or a valid reward is not finite.
    """
    included, values = _checked(rewards, group_ids, valid)
    if rewards.numel() == 0:
        return rewards.float()
    groups = _group(values, group_ids, included)
    weights = torch.where(included, response_tokens, 0).double()
    zeros = torch.zeros_like(groups.sizes)
    totals = zeros.index_add(0, groups.of_row, weights)
    means = zeros.index_add(0, groups.of_row, weights * values) / totals.clamp(min=1)
    return torch.where(included & ~groups.degenerate[groups.of_row], values - means[groups.of_row], 0.0).float()


def remax(rewards: Tensor, greedy_rewards: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return each reward minus the reward of the prompt's greedy response, f32 [B].

    ReMax (Li et al. 2023, arXiv:2310.10505). The baseline does not depend on other samples, so groups may have one row.

    >>> remax(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.25]))
    tensor([ 0.0000, -0.2500])

    Args:
        rewards: one per row, [B].
        greedy_rewards: reward of the greedy response to the row's prompt, [B].
        valid: rows to include, valid in both columns, bool [B]; None includes all.

    Raises:
        AlgorithmError: shapes differ, or a valid reward is not finite.
    """
    included = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    for column in (rewards, greedy_rewards):
        _check(column, torch.zeros_like(rewards, dtype=torch.int64), included)
    return torch.where(included, rewards.double() - greedy_rewards.double(), 0.0).float()


def reinforce_pp(
    rewards: Tensor,
    group_ids: Tensor,
    response_tokens: Tensor,
    *,
    center_groups: bool = False,
    valid: Tensor | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """Return rewards normalized over the tokens of the whole batch, f32 [B].

    REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): with γ = 1 and the reward at the end, the return of every token of a
    response is its reward; mean and standard deviation are taken over all response tokens. `center_groups` first
    subtracts the group's mean reward, the paper's variant with a baseline. With a KL penalty in the rewards, returns
    differ within a response: see `ActorWorker.token_returns`.

    >>> reinforce_pp(torch.tensor([1.0, 0.0]), torch.tensor([7, 9]), torch.tensor([10, 10]))
    tensor([ 0.9747, -0.9747])

    Args:
        rewards: one per row, [B].
        group_ids: rows with the same id are samples of one prompt, int64 [B].
        response_tokens: tokens of each response, int64 [B].
        center_groups: whether to subtract the group's mean reward; a group of one row then gets 0.
        valid: rows to include, bool [B]; None includes all.
        epsilon: added to the standard deviation, in units of the reward.

    Raises:
        AlgorithmError: shapes differ, or a valid reward is not finite.
    """
    included, values = _checked(rewards, group_ids, valid)
    if rewards.numel() == 0:
        return rewards.float()
    nonzero = included
    if center_groups:
        values, degenerate = _centered(values, group_ids, included)
        nonzero = included & ~degenerate
    weights = torch.where(included, response_tokens, 0).double()
    total = weights.sum()
    weighted = values[weights > 0]
    if not weighted.numel() or weighted.min() == weighted.max():
        return torch.zeros_like(rewards, dtype=torch.float32)
    mean = (weights * values).sum() / total
    deviation = ((weights * (values - mean).square()).sum() / (total - 1).clamp(min=1)).sqrt()
    return torch.where(nonzero, (values - mean) / (deviation + epsilon), 0.0).float()


def center_by_group(rewards: Tensor, group_ids: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return each reward minus the mean of its group, f32 [B]; 0 in groups with one row or equal rewards.

    >>> center_by_group(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([7, 7, 9]))
    tensor([ 0.5000, -0.5000,  0.0000])

    Args:
        rewards: one per row, [B].
        group_ids: rows with the same id are samples of one prompt, int64 [B].
        valid: rows to include, bool [B]; None includes all.

    Raises:
        AlgorithmError: shapes differ, or a valid reward is not finite.
    """
    included, values = _checked(rewards, group_ids, valid)
    if rewards.numel() == 0:
        return rewards.float()
    return torch.where(included, _centered(values, group_ids, included)[0], 0.0).float()


def zero_group_fraction(advantages: Tensor, group_ids: Tensor) -> float:
    """Return the fraction of groups whose advantages are all 0, which give no gradient.

    >>> zero_group_fraction(torch.tensor([0.5, -0.5, 0.0, 0.0]), torch.tensor([1, 1, 2, 2]))
    0.5

    Args:
        advantages: one per row, [B].
        group_ids: group of each row, int64 [B].
    """
    if advantages.numel() == 0:
        return 0.0
    ids, of_row = torch.unique(group_ids, return_inverse=True)
    largest = torch.zeros(len(ids), dtype=advantages.dtype).scatter_reduce(0, of_row, advantages.abs(), "amax")
    return (largest == 0).double().mean().item()


def _checked(rewards: Tensor, group_ids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return which rows are included, bool [B], and their rewards, f64 [B], 0 for others.

    Raises:
        AlgorithmError: see `_check`.
    """
    included = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    _check(rewards, group_ids, included)
    return included, torch.where(included, rewards.double(), 0.0)


def _check(rewards: Tensor, group_ids: Tensor, included: Tensor) -> None:
    """Raise an `AlgorithmError` if shapes differ or an included reward is not finite."""
    if rewards.ndim != 1 or group_ids.shape != rewards.shape or included.shape != rewards.shape:
        shapes = f"{list(rewards.shape)}, {list(group_ids.shape)} and {list(included.shape)}"
        raise AlgorithmError(f"rewards, group_ids and valid are {shapes}; each needs one entry per row, [B]")
    invalid = (included & ~rewards.isfinite()).nonzero().flatten().tolist()
    if invalid:
        reward = rewards[invalid[0]].item()
        raise AlgorithmError(f"the reward of row {invalid[0]} is {reward}; mark rows without a finite reward not valid")


def _centered(values: Tensor, group_ids: Tensor, included: Tensor) -> tuple[Tensor, Tensor]:
    """Return values minus their group's mean, f64 [B], and which rows are in degenerate groups, bool [B]; 0 there."""
    groups = _group(values, group_ids, included)
    degenerate = groups.degenerate[groups.of_row]
    return torch.where(degenerate, 0.0, values - groups.means[groups.of_row]), degenerate


def _group(values: Tensor, group_ids: Tensor, included: Tensor) -> _Groups:
    """Return sizes and means of the groups, and which of them are degenerate."""
    ids, of_row = torch.unique(group_ids, return_inverse=True)
    zeros = values.new_zeros(len(ids))
    sizes = zeros.index_add(0, of_row, included.double())
    means = zeros.index_add(0, of_row, values) / sizes.clamp(min=1)
    # Compare rewards, not deviations: the mean of equal rewards may differ from them in its last bit.
    infinity = torch.full_like(values, torch.inf)
    highest = (zeros - torch.inf).scatter_reduce(0, of_row, torch.where(included, values, -infinity), "amax")
    lowest = (zeros + torch.inf).scatter_reduce(0, of_row, torch.where(included, values, infinity), "amin")
    return _Groups(of_row, sizes, means, (sizes < 2) | (highest == lowest))

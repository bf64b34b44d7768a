"""Advantages of whole responses: how much better a sample is than what it is compared with.

Statistics are computed in float64 over group ids, never over prompt texts: two equal prompts are two groups. Where
there is nothing to compare (a group of one, rewards that are all equal) advantages are exactly 0. Rows that are not
`valid` get 0, stay outside the statistics, and may hold NaN.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]


class _Groups(NamedTuple):
    """Rows sorted into G groups, valid rows only."""

    of_row: Tensor  # int64 [B], the row's group
    sizes: Tensor  # float64 [G]
    means: Tensor  # float64 [G]
    flat: Tensor  # bool [G], fewer than two rows, or all rewards equal


def group_relative(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    valid: Tensor | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """Return every row's reward minus its group's baseline, over the group's standard deviation if asked: f32 [B].

    `mean` with `std` is GRPO (Shao et al. 2024, arXiv:2402.03300), `mean` without it Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783), `leave_one_out` without it RLOO (Ahmadian et al. 2024, arXiv:2402.14740). The deviation is the
    unbiased one (n - 1), with `epsilon` added.

    >>> group_relative(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([7, 7, 9]), scale="none")
    tensor([ 0.5000, -0.5000,  0.0000])
    >>> group_relative(torch.tensor([3.0, 0.0, 0.0]), torch.tensor([7, 7, 7]), baseline="leave_one_out", scale="none")
    tensor([ 3.0000, -1.5000, -1.5000])

    Args:
        rewards: one number a row, [B].
        group_ids: rows with the same id are samples of one prompt, int64 [B], in any order.
        baseline: mean of the group, or of the group's other rows.
        scale: `std` divides by the group's standard deviation.
        valid: rows that count, bool [B]; None counts all.
        epsilon: added to the standard deviation, in units of the reward.

    Raises:
        AlgorithmError: shapes differ, a name is unknown, or a valid reward is not finite.
    """
    if baseline not in ("mean", "leave_one_out"):
        raise AlgorithmError(f"baseline is {baseline!r}; algorithm.baseline is mean or leave_one_out")
    if scale not in ("std", "none"):
        raise AlgorithmError(f"scale is {scale!r}; algorithm.scale is std or none")
    counted, values = _counted(rewards, group_ids, valid)
    if rewards.numel() == 0:
        return rewards.float()
    groups = _group(values, group_ids, counted)
    centred = values - groups.means[groups.of_row]
    sizes = groups.sizes[groups.of_row]
    advantages = centred
    if baseline == "leave_one_out":
        advantages = centred * sizes / (sizes - 1).clamp(min=1)
    if scale == "std":
        squares = torch.zeros_like(groups.sizes).index_add(0, groups.of_row, torch.where(counted, centred**2, 0.0))
        deviations = (squares / (groups.sizes - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviations[groups.of_row] + epsilon)
    return torch.where(counted & ~groups.flat[groups.of_row], advantages, 0.0).float()


def opo(rewards: Tensor, group_ids: Tensor, response_tokens: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return every row's reward minus the mean of its group weighted by response lengths, f32 [B].

    OPO (Hao et al. 2025, arXiv:2505.23585): for gradients whose squared norm grows with the length, this baseline has
    the least variance.

    >>> opo(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), torch.tensor([30, 10]))
    tensor([ 0.2500, -0.7500])

    Args:
        rewards: one number a row, [B].
        group_ids: rows with the same id are samples of one prompt, int64 [B].
        response_tokens: the response's length, int64 [B].
        valid: rows that count, bool [B]; None counts all.

    Raises:
        AlgorithmError: shapes differ, or a valid reward is not finite.
    """
    counted, values = _counted(rewards, group_ids, valid)
    if rewards.numel() == 0:
        return rewards.float()
    groups = _group(values, group_ids, counted)
    weights = torch.where(counted, response_tokens, 0).double()
    zeros = torch.zeros_like(groups.sizes)
    totals = zeros.index_add(0, groups.of_row, weights)
    means = zeros.index_add(0, groups.of_row, weights * values) / totals.clamp(min=1)
    return torch.where(counted & ~groups.flat[groups.of_row], values - means[groups.of_row], 0.0).float()


def remax(rewards: Tensor, greedy_rewards: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return every row's reward minus that of the prompt's greedy response, f32 [B].

    ReMax (Li et al. 2023, arXiv:2310.10505). Every row has a comparison of its own, so groups of one will do.

    >>> remax(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.25]))
    tensor([ 0.0000, -0.2500])

    Args:
        rewards: one number a row, [B].
        greedy_rewards: reward of the likeliest response to the row's prompt, [B].
        valid: rows that count in both columns, bool [B]; None counts all.

    Raises:
        AlgorithmError: shapes differ, or a valid reward is not finite.
    """
    counted = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    for column in (rewards, greedy_rewards):
        _check(column, torch.zeros_like(rewards, dtype=torch.int64), counted)
    return torch.where(counted, rewards.double() - greedy_rewards.double(), 0.0).float()


def reinforce_pp(
    rewards: Tensor,
    group_ids: Tensor,
    response_tokens: Tensor,
    *,
    centre_groups: bool = False,
    valid: Tensor | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """Return rewards normalised over the tokens of the whole batch, f32 [B].

    REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): with γ = 1 and the reward at the end, every token of a response has
    the reward as its return, and mean and standard deviation are those of all response tokens. With `centre_groups` the
    group's mean reward is taken off first, the paper's variant with a baseline.

    >>> reinforce_pp(torch.tensor([1.0, 0.0]), torch.tensor([7, 9]), torch.tensor([10, 10]))
    tensor([ 0.9747, -0.9747])

    Args:
        rewards: one number a row, [B].
        group_ids: rows with the same id are samples of one prompt, int64 [B].
        response_tokens: the response's length, int64 [B].
        centre_groups: whether groups are compared within; a group of one then gives 0.
        valid: rows that count, bool [B]; None counts all.
        epsilon: added to the standard deviation, in units of the reward.

    Raises:
        AlgorithmError: shapes differ, or a valid reward is not finite.
    """
    counted, values = _counted(rewards, group_ids, valid)
    if rewards.numel() == 0:
        return rewards.float()
    teaches = counted
    if centre_groups:
        groups = _group(values, group_ids, counted)
        values = torch.where(groups.flat[groups.of_row], 0.0, values - groups.means[groups.of_row])
        teaches = counted & ~groups.flat[groups.of_row]
    weights = torch.where(counted, response_tokens, 0).double()
    total = weights.sum()
    kept = values[weights > 0]
    if not kept.numel() or kept.min() == kept.max():
        return torch.zeros_like(rewards, dtype=torch.float32)
    mean = (weights * values).sum() / total
    deviation = ((weights * (values - mean).square()).sum() / (total - 1).clamp(min=1)).sqrt()
    return torch.where(teaches, (values - mean) / (deviation + epsilon), 0.0).float()


def zero_group_fraction(advantages: Tensor, group_ids: Tensor) -> float:
    """Return the share of groups without any advantage: those that teach the policy nothing.

    >>> zero_group_fraction(torch.tensor([0.5, -0.5, 0.0, 0.0]), torch.tensor([1, 1, 2, 2]))
    0.5

    Args:
        advantages: one number a row, [B].
        group_ids: the rows' groups, int64 [B].
    """
    if advantages.numel() == 0:
        return 0.0
    ids, of_row = torch.unique(group_ids, return_inverse=True)
    largest = torch.zeros(len(ids), dtype=advantages.dtype).scatter_reduce(0, of_row, advantages.abs(), "amax")
    return (largest == 0).double().mean().item()


def _counted(rewards: Tensor, group_ids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return which rows count, bool [B], and their rewards, f64 [B], 0 where they don't; refuse what isn't sound."""
    counted = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    _check(rewards, group_ids, counted)
    return counted, torch.where(counted, rewards.double(), 0.0)


def _check(rewards: Tensor, group_ids: Tensor, counted: Tensor) -> None:
    """Refuse columns that don't fit together, and rewards that are no numbers."""
    if rewards.ndim != 1 or group_ids.shape != rewards.shape or counted.shape != rewards.shape:
        shapes = f"{list(rewards.shape)}, {list(group_ids.shape)} and {list(counted.shape)}"
        raise AlgorithmError(f"rewards, group_ids and valid are {shapes}; each needs one entry a row, [B]")
    broken = (counted & ~rewards.isfinite()).nonzero().flatten().tolist()
    if broken:
        reward = rewards[broken[0]].item()
        raise AlgorithmError(f"the reward of row {broken[0]} is {reward}; mark rows without a finite one as not valid")


def _group(values: Tensor, group_ids: Tensor, counted: Tensor) -> _Groups:
    """Return sizes and means of the groups, and which of them have nothing to compare."""
    ids, of_row = torch.unique(group_ids, return_inverse=True)
    zeros = values.new_zeros(len(ids))
    sizes = zeros.index_add(0, of_row, counted.double())
    means = zeros.index_add(0, of_row, values) / sizes.clamp(min=1)
    # Compared by value, since the mean of equal rewards may differ from them in its last bit.
    infinity = torch.full_like(values, torch.inf)
    highest = (zeros - torch.inf).scatter_reduce(0, of_row, torch.where(counted, values, -infinity), "amax")
    lowest = (zeros + torch.inf).scatter_reduce(0, of_row, torch.where(counted, values, infinity), "amin")
    return _Groups(of_row, sizes, means, (sizes < 2) | (highest == lowest))

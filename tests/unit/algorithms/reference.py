"""GRPO's objective, one sequence and one token at a time, in plain floats: the reference for the vectorized code."""

import math
import statistics


def advantages(rewards, groups, baseline, scale, epsilon):
    result = []
    for row, reward in enumerate(rewards):
        members = [r for r, group in zip(rewards, groups, strict=True) if group == groups[row]]
        others = [r for i, r in enumerate(rewards) if groups[i] == groups[row] and i != row]
        if not others or min(members) == max(members):
            result.append(0.0)
            continue
        center = statistics.fmean(members if baseline == "mean" else others)
        result.append((reward - center) / (statistics.stdev(members) + epsilon if scale == "std" else 1.0))
    return result


def opo(rewards, groups, lengths):
    """Rewards minus the mean reward over all tokens of the group."""
    result = []
    for group, reward in zip(groups, rewards, strict=True):
        members = [(r, n) for r, g, n in zip(rewards, groups, lengths, strict=True) if g == group]
        tokens = [r for r, n in members for _ in range(n)]
        equal = len({r for r, _ in members}) == 1
        result.append(0.0 if equal else reward - (statistics.fmean(tokens) if tokens else 0.0))
    return result


def reinforce_pp(rewards, groups, lengths, center_groups, epsilon):
    """Returns of all response tokens, normalized by their mean and standard deviation."""
    values, degenerate = list(rewards), [False] * len(rewards)
    if center_groups:
        for row, group in enumerate(groups):
            members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
            degenerate[row] = len(set(members)) == 1
            values[row] = 0.0 if degenerate[row] else rewards[row] - statistics.fmean(members)
    tokens = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    if len(set(tokens)) < 2:
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    pairs = zip(values, degenerate, strict=True)
    return [0.0 if zero else (value - mean) / (deviation + epsilon) for value, zero in pairs]


def token_loss(new, old, advantage, clip_low, clip_high, dual_clip):
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    objective = min(ratio * advantage, clipped * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return -objective


def gmpo(new, old, advantage, clip_low, clip_high):
    """The objective of one sequence: a product of clipped terms to the power of 1/n, with the sign of the advantage."""
    product, low, high = 1.0, math.exp(-clip_low), math.exp(clip_high)
    for one, other in zip(new, old, strict=True):
        ratio = math.exp(one - other)
        product *= abs(min(ratio * advantage, min(max(ratio, low), high) * advantage)) ** (1 / len(new))
    return math.copysign(product, advantage)


def aggregate(losses, masks, aggregation, constant):
    """losses and masks: one list a sequence."""
    masked = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(losses, masks, strict=True)]
    rows = [row for row in masked if row]
    if not rows:
        return 0.0
    if aggregation == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation == "seq_mean_token_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if aggregation == "seq_mean_token_sum":
        return sum(sum(row) for row in rows) / len(rows)
    if aggregation == "token_sum":
        return sum(sum(row) for row in rows)
    return sum(sum(row) for row in rows) / (constant * len(rows))

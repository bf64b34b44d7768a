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


def token_loss(new, old, advantage, clip_low, clip_high, dual_clip):
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    objective = min(ratio * advantage, clipped * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return -objective


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
    return sum(sum(row) for row in rows) / (constant * len(rows))

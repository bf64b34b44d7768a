"""Training steps that teach nothing: every response to a prompt got the same reward."""

from collections.abc import Mapping, Sequence
from typing import Any

# This many steps without a signal at the start of training are reported.
NUM_STEPS = 2


def lacks_signal(metrics: Mapping[str, Any]) -> bool:
    """Return whether a training step's rewards give no gradient: they are equal within each group, or in the batch.

    >>> lacks_signal({"reward/min": 0.0, "reward/max": 0.0}), lacks_signal({"reward/min": 0.0, "reward/max": 1.0})
    (True, False)
    >>> lacks_signal({"reward/min": 0.0, "reward/max": 1.0, "advantage/zero_group_fraction": 1.0})
    True
    >>> lacks_signal({"reward/min": 0.0, "reward/max": 0.0, "advantage/zero_group_fraction": 0.5})  # as in ReMax
    False
    """
    lowest, zero_groups = metrics.get("reward/min"), metrics.get("advantage/zero_group_fraction")
    return zero_groups == 1 if zero_groups is not None else lowest is not None and lowest == metrics.get("reward/max")


def no_signal_text(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning about training steps none of which has a signal, and what to check.

    Args:
        steps: the metrics of all training steps so far, at least one.
    """
    means = [step.get("reward/mean", 0.0) for step in steps]
    lowest, highest = (f"{value:.3g}" for value in (min(means), max(means)))
    mean = lowest if lowest == highest else f"{lowest} to {highest}"
    return (
        f"no learning signal in {len(steps)} training steps: the rewards of each group are all equal (reward/mean is "
        f"{mean}), so only a KL term has a gradient. Read the completions in samples.jsonl and check why "
        "none of them earns a different reward: the reward function, data.answer_column and rollout.max_new_tokens. A "
        "new model (model.path=null) has to learn the answers' format first: sft_warmup.steps, data.completion_column"
    )

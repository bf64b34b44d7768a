"""The one table of metric names: a name that isn't here is a mistake, and the reference page is made from it.

`python -m rlpack.observe.metric_table` writes docs/reference/metrics.md.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ANY = "<name>"
REFERENCE = Path("docs/reference/metrics.md")


class UnknownMetricWarning(UserWarning):
    """A metric was logged whose name is not in the table."""


@dataclass(frozen=True)
class Metric:
    """What a metric is.

    Attributes:
        unit: unit of its value; `1` for plain numbers, `fraction` for numbers from 0 to 1.
        description: one sentence.
    """

    unit: str
    description: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("1", "Mean reward of the step's rollouts; quarantined rows are left out."),
    "reward/std": Metric("1", "Standard deviation of the step's rewards."),
    "reward/min": Metric("1", "Lowest reward of the step."),
    "reward/max": Metric("1", "Highest reward of the step."),
    "reward/quarantined": Metric("rows", "Rollouts whose reward was missing or not a finite number; they don't train."),
    "reward/timeouts": Metric("rows", "Rows that a reward function took too long for; they are quarantined."),
    "reward/errors": Metric("rows", "Rows that a reward function raised on; they are quarantined."),
    "reward/killed": Metric("rows", "Rows whose reward process died; they are quarantined."),
    "reward/invalid": Metric("rows", "Rows that a reward function gave no number for; they are quarantined."),
    "reward/output_bytes": Metric("bytes", "What reward functions wrote to standard output and error."),
    "reward/retries": Metric("1", "Requests to a judge beyond the first of each row."),
    "reward/functions/<name>": Metric(
        "1", "Mean of what one of reward.functions, or a role's column reward_<name>, gave, before its weight."
    ),
    "reward/roles/<name>": Metric("1", "Mean of what one of several scoring roles added to the reward."),
    "rollout/response_tokens_mean": Metric("tokens", "Mean length of the responses."),
    "rollout/response_tokens_max": Metric("tokens", "Length of the longest response."),
    "rollout/truncated_fraction": Metric("fraction", "Responses that ended at rollout.max_new_tokens."),
    "rollout/logprob_gap": Metric("nats", "Mean absolute difference of the trainer's and the sampler's log-probs."),
    "actor/loss": Metric("1", "What is minimised: policy loss plus the weighted KL term."),
    "actor/policy_loss": Metric("1", "The clipped policy loss."),
    "actor/kl": Metric("nats", "Estimated KL divergence from the reference, by algorithm.kl_estimator."),
    "actor/entropy": Metric("nats", "Mean entropy of the policy at the sampled tokens."),
    "actor/ratio_mean": Metric("1", "Mean ratio of new and old probability of the sampled tokens."),
    "actor/ratio_max": Metric("1", "Largest such ratio."),
    "actor/clip_low_fraction": Metric("fraction", "Tokens whose gradient the lower bound of the ratio cut off."),
    "actor/clip_high_fraction": Metric("fraction", "Tokens whose gradient the upper bound of the ratio cut off."),
    "actor/grad_norm": Metric("1", "Global norm of the gradient before clipping."),
    "actor/learning_rate": Metric("1", "Learning rate of the optimizer step."),
    "actor/skipped_steps": Metric("steps", "Optimizer steps left out: no token had a gradient, or it was not finite."),
    "critic/loss": Metric("1", "Half the squared error of values, bounded by critic.value_clip; mean over tokens."),
    "critic/value_mean": Metric("1", "Mean value of the response tokens, while the critic is updated."),
    "critic/return_mean": Metric("1", "Mean return of the response tokens."),
    "critic/explained_variance": Metric("1", "1 - the variance of returns less values, over the returns' variance."),
    "critic/clip_fraction": Metric("fraction", "Tokens whose value critic.value_clip holds."),
    "critic/grad_norm": Metric("1", "Global norm of the critic's gradient before clipping."),
    "critic/learning_rate": Metric("1", "Learning rate of the critic's optimizer step."),
    "critic/skipped_steps": Metric("steps", "Optimizer steps of the critic left out, as actor/skipped_steps."),
    "reference/kl": Metric("nats", "Divergence of a response from the reference, summed over its tokens; mean."),
    "reference/kl_coef": Metric("1", "Weight of the KL term in this step."),
    "sampling/rounds": Metric("1", "Times that prompts were drawn for the step (recipe=dapo)."),
    "sampling/informative_fraction": Metric("fraction", "Groups drawn for the step whose rewards differ."),
    "sampling/discarded_groups": Metric("groups", "Groups drawn for the step that don't train."),
    "sampling/filled_groups": Metric("groups", "Groups in the batch whose rewards are alike: dapo.max_rounds was met."),
    "sampling/overlong_filtered": Metric("rows", "Responses left out of the loss by dapo.overlong_filter."),
    "reward/greedy_mean": Metric("1", "Mean reward of the likeliest responses (recipe=remax)."),
    "advantage/mean": Metric("1", "Mean advantage of the rollouts that train."),
    "advantage/std": Metric("1", "Standard deviation of these advantages."),
    "advantage/zero_group_fraction": Metric("fraction", "Groups without a gradient: all their rewards are equal."),
    "evaluation/accuracy_sampled": Metric(
        "1", "Held-out mean reward over evaluation.samples samples: accuracy for rewards 0 and 1."
    ),
    "evaluation/accuracy_best_of_n": Metric(
        "1", "Held-out mean of each prompt's best reward: solved prompts for rewards 0 and 1."
    ),
    "evaluation/accuracy_greedy": Metric(
        "1", "Held-out mean reward of the likeliest tokens: accuracy for rewards 0 and 1."
    ),
    "evaluation/quarantined": Metric(
        "rows", "Responses to held-out prompts without a usable reward; they count as 0 in the three above."
    ),
    "evaluation/loss": Metric("nats", "Mean negative log-prob of the held-out demonstrations' tokens (recipe=sft)."),
    "evaluation/perplexity": Metric("1", "The exponential of evaluation/loss."),
    "sft_warmup/loss": Metric("nats", "Mean negative log-prob of the demonstrations' tokens."),
    "sft_warmup/grad_norm": Metric("1", "Global norm of the supervised gradient before clipping."),
    "sft_warmup/learning_rate": Metric("1", "Learning rate of the supervised step."),
    "sft_warmup/skipped_steps": Metric("steps", "Supervised steps left out, as actor/skipped_steps."),
    "time/step_s": Metric("s", "Wall-clock time of the whole step."),
    "time/generate_s": Metric("s", "Generation, and what scoring roles that share its processes do in between."),
    "time/reward_s": Metric("s", "Waiting for rewards; what was done beside generation and log-probs is left out."),
    "time/logprobs_s": Metric("s", "Log-probs of the policy before its update, scoring as for generation."),
    "time/reference_s": Metric("s", "Log-probs of the reference."),
    "time/values_s": Metric("s", "Values of the critic before its update."),
    "time/update_critic_s": Metric("s", "Forward, backward and optimizer of the critic."),
    "time/greedy_s": Metric("s", "Generation of the likeliest responses."),
    "time/advantages_s": Metric("s", "Advantages."),
    "time/update_s": Metric("s", "Forward, backward and optimizer."),
    "time/sync_s": Metric("s", "Weight transfer to generation."),
    "time/evaluate_s": Metric("s", "Evaluation on the held-out split."),
    "time/checkpoint_s": Metric("s", "Checkpoints."),
    "throughput/tokens_per_s": Metric("tokens/s", "Real tokens, prompt and response, trained per second of the step."),
    "packing/microbatches_per_rank": Metric("1", "Microbatches per rank, dummy ones included."),
    "packing/num_microbatches": Metric("microbatches", "Microbatches that hold rows, over ranks and optimizer steps."),
    "packing/bin_utilisation": Metric("fraction", "Real tokens over microbatches × token budget."),
    "packing/waste_ratio": Metric("fraction", "Token slots that hold no real token."),
    "packing/bin_balance": Metric("fraction", "Mean slots over the most slots of a microbatch."),
    "packing/packing_efficiency": Metric("fraction", "Fewest microbatches the rows could be packed into over theirs."),
    "packing/rank_imbalance": Metric("1", "Most slots of a rank over the mean of the ranks, minus 1."),
    "packing/lockstep_overhead": Metric("1", "Time lost because ranks meet at every microbatch, over the ideal time."),
    "packing/dummy_microbatches": Metric("microbatches", "Empty microbatches that equalize the counts of all ranks."),
    "packing/overlong": Metric("rows", "Sequences over the token budget."),
    "packing/critical_slots": Metric(
        "tokens", "Slots of the costliest microbatch at each index, which all ranks wait for."
    ),
    "packing/critical_squares": Metric("tokens²", "Squared slots of the sequences of these microbatches, summed."),
    "packing/dropped": Metric("rows", "Overlong sequences that were left out."),
    "packing/truncated_tokens": Metric("tokens", "Tokens cut from overlong sequences."),
    "packing/real_tokens": Metric("tokens", "Tokens that are not padding."),
    "packing/search_limit_hits": Metric("steps", "Optimizer steps in which algorithm=optimal hit its search limit."),
    "packing/groups_split": Metric("groups", "Groups over the token budget that were split."),
    "packing/slots": Metric("tokens", "Token slots, padding and dummy microbatches included."),
    "store/peak_bytes": Metric(
        "bytes", "Most tokens and texts of a step in the object store at once; a dataset's own left out."
    ),
    "policy_version": Metric("steps", "Optimizer steps taken so far, those of the warm-up included."),
    "epoch": Metric("1", "Epoch of the dataset that the step's last prompt belongs to, from 0."),
    "prompts_trained": Metric("prompts", "Prompts used up by training since the start of the run."),
}


def unknown_names(names: Iterable[str]) -> list[str]:
    """Return the names that are not in the table, sorted.

    >>> unknown_names(["reward/mean", "rewards/mean"])
    ['rewards/mean']
    """
    families = tuple(name.removesuffix(_ANY) for name in METRICS if name.endswith(_ANY))
    return sorted(name for name in set(names) - METRICS.keys() if not name.startswith(families))


def check_names(names: Iterable[str]) -> None:
    """Warn about names that are not in the table; the project's own tests make that an error."""
    for name in unknown_names(names):
        text = f"metric {name!r} is not in rlpack.observe.metric_table.METRICS; add it there, with unit and description"
        warnings.warn(text, UnknownMetricWarning, stacklevel=3)


def reference() -> str:
    """Return the reference page of all metrics, as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Every record of `metrics.jsonl` is one JSON object: `step`, `phase` (`sft_warmup`, `train` or `evaluation`),",
        "`time_s` (seconds since the run began, pauses between resumed parts left out) and the metrics below. A figure",
        'that is not finite is written as the text `"NaN"`, `"Infinity"` or `"-Infinity"`. TensorBoard and W&B show',
        "the same names after `<phase>/`.",
        "",
        "This page is generated from `rlpack/observe/metric_table.py` by `python -m rlpack.observe.metric_table`.",
    ]
    family = None
    for name, metric in METRICS.items():
        heading = name.split("/", 1)[0] if "/" in name else "counters"
        if heading != family:
            lines += ["", f"## {heading}", "", "| name | unit | meaning |", "|---|---|---|"]
            family = heading
        lines.append(f"| `{name}` | {metric.unit} | {metric.description} |")
    return "\n".join(lines) + "\n"


def write_reference(path: Path = REFERENCE) -> None:
    """Write the reference page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    write_reference()

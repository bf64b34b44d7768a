"""The section of off-policy correction."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from rlpack.config.sections.section import Positive, Section

# Names of criteria, as in verl; `seq_max_k1` is ours.
CRITERIA = (
    *(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")),
    "binary_kl",
)

# Metrics `mismatch/<name>` that can have limits.
MISMATCHES = ("kl", "k3", "chi2", "gap", "largest_gap", "perplexity_ratio")
# Metrics with a lower limit.
LOWER_LIMITED = ("effective_share",)
# Further ones, with the key that gives a run these metrics.
OF_KEYS = {"weights_bounded": "weights", "rejected_tokens": "reject", "rejected_rows": "reject"}


class Correction(Section):
    """Correct for responses of another policy: an older one, or an engine that rounds differently.

    The formulas are in `rlpack.algorithms.correction`.
    """

    weights: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Multiply each token's policy loss by an importance weight: its own ratio π_old / μ, or the "
        "product over its response. μ is the policy that sampled.",
    )
    upper: Positive = Field(default=2.0, description="Largest importance weight; larger ones are truncated to it.")
    lower: Positive | None = Field(
        default=None,
        description="Smallest importance weight; if set, weights outside [lower, upper] become 0 instead (IcePop).",
    )
    normalize: bool = Field(
        default=False,
        description="Divide the importance weights by their mean over the step's batch, so that they don't scale the "
        "loss: the mean over tokens with weights=token, over responses with sequence.",
    )
    reject: dict[str, float | list[float]] = Field(
        default_factory=dict,
        description="Exclude tokens or responses that diverge too far. Each key is a criterion: token, seq_sum, "
        "seq_mean or seq_max with the suffix _k1, _k2 or _k3, or binary_kl (of tokens). Its value is the largest "
        "divergence in nats; for k1, a range of the ratio μ / π_old, [lower, upper], or one number u for [1/u, u].",
    )
    warn_above: dict[str, float] = Field(
        default_factory=dict,
        description="Limits on metrics mismatch/<name>, as {k3: 0.1, lag_1/k3: 0.2}; above, the run warns once. "
        "weights_bounded needs weights; rejected_tokens and rejected_rows need reject.",
    )
    stop_above: dict[str, float] = Field(
        default_factory=dict, description="Limits on the same metrics above which the run ends."
    )
    warn_below: dict[str, float] = Field(
        default_factory=dict,
        description="A limit on the effective sample size, as {effective_share: 0.5} or {lag_1/effective_share: 0.5}; "
        "below, the run warns once.",
    )
    stop_below: dict[str, float] = Field(
        default_factory=dict, description="A limit on the same metric below which the run ends."
    )
    bypass: bool = Field(
        default=False,
        description="Take the sampler's own log-probs as the old ones. The policy loss then clips the ratio to the "
        "policy that sampled, and the old-log-prob pass is skipped, unless reject or a limit needs it.",
    )

    @property
    def skips_old_logprobs(self) -> bool:
        """Whether the old-log-prob pass is left out."""
        return self.bypass and not self.measures

    @property
    def normalizes(self) -> bool:
        """Whether there are importance weights, and they are normalized."""
        return self.normalize and self.weights != "none"

    @property
    def measures(self) -> bool:
        """Whether the correction compares old log-probs with the sampler's."""
        return self.weights != "none" or bool(self.reject) or any(limits for _, limits in self.limits)

    @property
    def limits(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the key and the limits of each mapping, those that end the run first."""
        yield "stop_above", self.stop_above
        yield "stop_below", self.stop_below
        yield "warn_above", self.warn_above
        yield "warn_below", self.warn_below

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Return lower and upper bound of each criterion in `reject`; see `bounds_of`."""
        return {name: bounds_of(name, value) for name, value in self.reject.items()}


def bounds_of(criterion: str, value: float | Sequence[float]) -> tuple[float, float]:
    """Return lower and upper bound of a criterion.

    Bounds of `k1` are two numbers, or one number u for [1 / u, u]. For the others it is one number; the lower bound is
    then 0.

    >>> bounds_of("seq_mean_k1", 2.0), bounds_of("token_k3", 0.5)
    ((0.5, 2.0), (0.0, 0.5))

    Raises:
        ValueError: the value is not of this form.
    """
    numbers = [value] if isinstance(value, int | float) else list(value)
    if not numbers or len(numbers) > 2 or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError("it takes one or two positive numbers")
    if not criterion.endswith("k1"):
        if len(numbers) > 1:
            raise ValueError("it takes one number, the largest divergence in nats")
        return 0.0, numbers[0]
    lower, upper = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
    if lower > upper:
        raise ValueError(f"its lower bound {lower:g} exceeds the upper one, {upper:g}")
    return lower, upper

"""The limit on the gap between the trainer's and the sampler's log-probs: a warning, then the end of the run.

Both compute the log-probs of the same tokens with the same weights, so they differ by rounding. A larger gap means
that responses come from another policy than the one that is trained: an engine with other weights, another attention
mask, another precision. The policy gradient is then wrong, and no other metric shows it.
"""

import logging
from dataclasses import dataclass

import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.store import Store
from rlpack.config.schema import Config
from rlpack.rollout.errors import LogprobGapError

logger = logging.getLogger(__name__)

# Mean gaps in nats above which a run warns, by the actor's precision. In fp32 correct runs stay under 1e-4. In bf16,
# with an engine in fp32, the largest mean of 30 random models was 0.28 (see `rlpack.rollout.canary`).
DEFAULT_LIMITS = {"fp32": 0.05, "bf16": 0.3}
# The run ends at this multiple of the limit.
FATAL_FACTOR = 10.0

_NUM_ROWS, _NUM_TOKENS = 3, 3


@dataclass
class LogprobGapLimit:
    """Warns once above a limit, and raises above ten times that.

    Responses of an older policy (`trainer.lead`) differ by its updates, too: above ten times the limit they warn once.

    Attributes:
        limit: limit on the mean gap over response tokens, in nats; None checks nothing.
        warned: whether the warning was given.
        warned_of_lag: whether the warning for responses of an older policy was given.
    """

    limit: float | None
    warned: bool = False
    warned_of_lag: bool = False

    @classmethod
    def from_config(cls, config: Config) -> "LogprobGapLimit":
        """Return the limit of a run.

        Filters such as top-k change the sampler's log-probs and not the trainer's, so there is no default with them.
        """
        settings = config.rollout
        filtered = settings.top_p < 1 or settings.top_k > 0
        default = None if filtered else DEFAULT_LIMITS[config.actor.precision]
        return cls(default if settings.max_logprob_gap is None else settings.max_logprob_gap)

    def is_fatal(self, gap: float) -> bool:
        """Return whether a gap ends the run."""
        return self.limit is not None and not gap <= FATAL_FACTOR * self.limit

    def check_lagged(self, gap: float, step: int, lag: int) -> None:
        """Warn about the mean gap of a step whose responses are up to `lag` publications old, in nats."""
        if self.is_fatal(gap) and not self.warned_of_lag:
            self.warned_of_lag = True
            logger.warning(
                "step %d: the trainer's and the sampler's log-probs of the same responses differ by %.3g nats on "
                "average, over %g times the limit of %g, and the responses are up to %d publications old: either "
                "updates are large, or the engine is wrong; rollout/canary_gap is at equal weights. Lower the learning "
                "rate or trainer.lead. Later steps don't repeat this.",
                *(step, gap, FATAL_FACTOR, self.limit, lag),
            )

    def check(self, gap: float, scored: BatchedDataDict | None, store: Store, step: int, when: str = "") -> None:
        """Warn or raise about the mean gap of a step.

        Args:
            gap: mean absolute difference over the step's response tokens, in nats.
            scored: if the gap is fatal: the rollouts with the trainer's `logprobs`, and `logprob_gap` and
                `response_tokens` of each row.
            store: where their tokens are.
            step: number of the step.
            when: precedes the rows that differ most in the error, if `scored` was measured at another time.

        Raises:
            LogprobGapError: the gap exceeds ten times the limit; it names the rows and tokens that differ most.
        """
        if self.limit is None or gap <= self.limit:
            return
        what = (
            f"step {step}: the trainer's and the sampler's log-probs of the same responses differ by {gap:.3g} nats on "
            "average"
        )
        advice = (
            "compare the precision, attention and weights of actor and rollout engine; rollout.max_logprob_gap sets "
            "the limit"
        )
        if self.is_fatal(gap):
            worst = "" if scored is None else f"; {when}most in {_worst_rows(scored, store)}"
            raise LogprobGapError(f"{what}, over {FATAL_FACTOR:g} times the limit of {self.limit:g}{worst}; {advice}")
        if not self.warned:
            self.warned = True
            logger.warning("%s, over the limit of %g; %s. Later steps don't repeat this.", what, self.limit, advice)


def _worst_rows(scored: BatchedDataDict, store: Store) -> str:
    """Return the rows with the largest mean gap, and the tokens of each that differ most."""
    means = scored["logprob_gap"] / scored["response_tokens"].clamp(min=1)
    rows = means.nan_to_num(torch.inf).topk(min(_NUM_ROWS, means.shape[0])).indices
    columns = scored.keep(["uid", "input_ids", "response_mask", "logprobs", "rollout_logprobs"])
    batch = store.fetch(columns.select(rows))
    described = []
    for place, row in enumerate(rows.tolist()):
        token_ids, mask, own, sampled = (
            batch[name][place] for name in ("input_ids", "response_mask", "logprobs", "rollout_logprobs")
        )
        gaps = (own - sampled).abs().nan_to_num(torch.inf).where(mask, -1.0)
        positions = gaps.topk(min(_NUM_TOKENS, gaps.shape[0])).indices.tolist()
        tokens = ", ".join(
            f"token {int(token_ids[at])} at {at} (trainer {own[at]:.4g}, sampler {sampled[at]:.4g})"
            for at in positions
            if mask[at]
        )
        described.append(f"row {row} ({batch['uid'][place]}, mean {means[row]:.3g}): {tokens}")
    return "; ".join(described)

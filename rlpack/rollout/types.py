"""The data of generation: sampling parameters, the results of engines, and trajectories.

Letters: B rows, S segments of all rows, n tokens of one segment. Each token of a sampled segment has a log-prob and a
policy version, in the order of the token ids; given tokens (prompts, tool results) have neither.

A *policy version* is the number of weight publications that the engine had received when it sampled the token: 0 before
the first, 1 after it. It is not the number of optimizer steps, which the metric `optimizer_steps` counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlpack.batch.ragged import Ragged
from rlpack.rollout.errors import EngineError, SamplingError

FinishReason = Literal["stop", "length"]
FINISH_REASONS = get_args(FinishReason)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled: temperature first, then top-k, then top-p of the remaining tokens.

    >>> SamplingParams(temperature=0.0, max_new_tokens=8).is_greedy
    True

    Attributes:
        temperature: divides the logits; 0 selects the most likely token (greedy, used in evaluation).
        top_p: keep the smallest set of tokens with at least this probability (nucleus, arXiv:1904.09751). Which tokens
            of equal probability are left out at its border, if any, depends on the engine.
        top_k: keep the k most likely tokens and all that tie with the last of them; 0 keeps all. vLLM on GPUs keeps k
            tokens, whichever tie.
        max_new_tokens: longest response, including its stop token.
        stop_token_ids: ids that end a response; the stop token is part of the response.

    Raises:
        SamplingError: a value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every value against its range."""
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more"),
            ("stop_token_ids", self.stop_token_ids, min(self.stop_token_ids, default=0) >= 0, "ids of 0 or more"),
        )
        for name, value, is_valid, allowed in checks:
            if not is_valid:
                raise SamplingError(f"{name} is {value}; rollout.{name} has to be {allowed}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is selected at every position."""
        return self.temperature == 0


@dataclass(frozen=True)
class Generations:
    """One response for every prompt, in the order of the prompts.

    Attributes:
        token_ids: responses without their prompts, including the stop token, int64 [B rows].
        logprobs: log-probability of each token under the distribution that it was sampled from (after temperature,
            top-k and top-p, renormalized; 0 when greedy), f32, lengths as `token_ids`.
        policy_versions: the policy version that sampled each token, int32, lengths as `token_ids`.
        finish_reasons: `stop` after a stop token, `length` at the limit, one per row.

    Raises:
        EngineError: the columns do not fit together.
    """

    token_ids: Ragged
    logprobs: Ragged
    policy_versions: Ragged
    finish_reasons: list[FinishReason]

    def __post_init__(self) -> None:
        """Check that every token has a log-prob and a version, and every row a finish reason."""
        _check_columns(self.token_ids, self.logprobs, self.policy_versions)
        if len(self.finish_reasons) != self.token_ids.num_rows:
            reasons = len(self.finish_reasons)
            raise EngineError(f"the engine returned {reasons} finish reasons for {self.token_ids.num_rows} rows")
        _check_reasons(self.finish_reasons)


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a trajectory that are all given or all sampled.

    Attributes:
        token_ids: int64 [n].
        source: where the tokens come from: `prompt`, `policy`, or the name of a tool or an environment.
        logprobs: f32 [n] of a sampled segment; None for given tokens, which never train.
        policy_versions: int32 [n] of a sampled segment, else None.

    Raises:
        EngineError: a sampled segment lacks a log-prob or a version for a token.
    """

    token_ids: Tensor
    source: str
    logprobs: Tensor | None = None
    policy_versions: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that log-probs and versions are both there, one per token, or both absent."""
        num_tokens = self.token_ids.shape[0]
        counts = [len(column) for column in (self.logprobs, self.policy_versions) if column is not None]
        if counts not in ([], [num_tokens, num_tokens]):
            raise EngineError(
                f"a segment of {num_tokens} {self.source} tokens has {counts} log-probs and versions; "
                "a sampled segment has one of each per token, a given segment has none"
            )

    @property
    def is_sampled(self) -> bool:
        """Whether the policy sampled these tokens."""
        return self.logprobs is not None


@dataclass(frozen=True)
class Trajectory:
    """One row of a rollout: its segments in order, and the reason why generation ended."""

    segments: tuple[Segment, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class TrajectoryBatch:
    """Trajectories as columns, so that assembling them loops over neither rows nor tokens.

    Attributes:
        token_ids: tokens of all segments, trajectory by trajectory, int64 [S rows].
        num_segments: segments of each trajectory, int64 [B].
        is_sampled: whether the policy sampled the segment, bool [S].
        sources: `Segment.source` of each segment, S.
        logprobs: log-probs of the tokens of the sampled segments, in order, f32 [sampled tokens].
        policy_versions: policy versions of the same tokens, int32 [sampled tokens].
        finish_reasons: one per trajectory, B.

    Raises:
        EngineError: the columns do not fit together.
    """

    token_ids: Ragged
    num_segments: Tensor
    is_sampled: Tensor
    sources: Sequence[str]
    logprobs: Tensor
    policy_versions: Tensor
    finish_reasons: Sequence[FinishReason]

    def __post_init__(self) -> None:
        """Check that the counts of segments, rows and sampled tokens agree."""
        segments = (self.token_ids.num_rows, int(self.num_segments.sum()), len(self.is_sampled), len(self.sources))
        rows = (len(self.num_segments), len(self.finish_reasons))
        sampled = int(self.token_ids.lengths[self.is_sampled].sum())
        tokens = (sampled, len(self.logprobs), len(self.policy_versions))
        for name, counts in (("segments", segments), ("trajectories", rows), ("sampled tokens", tokens)):
            if len(set(counts)) > 1:
                raise EngineError(f"columns of a trajectory batch have {counts} {name}; they need the same number")
        _check_reasons(self.finish_reasons)

    @property
    def num_rows(self) -> int:
        """The number of trajectories (B)."""
        return len(self.num_segments)

    @classmethod
    def single_turn(cls, prompts: Ragged, generations: Generations) -> "TrajectoryBatch":
        """Return one trajectory per prompt: the prompt, then the sampled response.

        Args:
            prompts: token ids, int64, B rows, as they were given to the engine.
            generations: the engine's responses to them.

        Raises:
            EngineError: there are not as many responses as prompts.
        """
        responses, num_rows = generations.token_ids, prompts.num_rows
        if responses.num_rows != num_rows:
            raise EngineError(f"the engine returned {responses.num_rows} responses for {num_rows} prompts")
        alternating = torch.arange(2 * num_rows).view(2, num_rows).T.flatten()  # prompt 0, response 0, prompt 1, ...
        return cls(
            token_ids=Ragged.concat([prompts, responses]).select(alternating),
            num_segments=torch.full((num_rows,), 2),
            is_sampled=torch.tensor([False, True]).repeat(num_rows),
            sources=("prompt", "policy") * num_rows,
            logprobs=generations.logprobs.values,
            policy_versions=generations.policy_versions.values,
            finish_reasons=generations.finish_reasons,
        )

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> "TrajectoryBatch":
        """Return the columns of any trajectories, multi-turn ones included."""
        segments = [segment for trajectory in trajectories for segment in trajectory.segments]
        logprobs = [segment.logprobs for segment in segments if segment.logprobs is not None]
        versions = [segment.policy_versions for segment in segments if segment.policy_versions is not None]
        return cls(
            token_ids=Ragged.from_rows([segment.token_ids for segment in segments], torch.int64),
            num_segments=torch.tensor([len(trajectory.segments) for trajectory in trajectories], dtype=torch.int64),
            is_sampled=torch.tensor([segment.is_sampled for segment in segments], dtype=torch.bool),
            sources=[segment.source for segment in segments],
            logprobs=torch.cat([torch.zeros(0), *logprobs]),
            policy_versions=torch.cat([torch.zeros(0, dtype=torch.int32), *versions]),
            finish_reasons=[trajectory.finish_reason for trajectory in trajectories],
        )


def _check_reasons(reasons: Sequence[str]) -> None:
    """Raise on a finish reason that nothing downstream knows, such as that of an aborted request."""
    for row, reason in enumerate(reasons):
        if reason not in FINISH_REASONS:
            allowed = " or ".join(FINISH_REASONS)
            raise EngineError(f"row {row} has the finish reason {reason!r}; it has to be {allowed}")


def _check_columns(token_ids: Ragged, logprobs: Ragged, versions: Ragged) -> None:
    """Raise unless every token has one log-prob and one version."""
    for name, column in (("log-probs", logprobs), ("policy versions", versions)):
        if not token_ids.lengths.equal(column.lengths):
            counts = f"{token_ids.values.shape[0]} tokens and {column.values.shape[0]} {name}"
            raise EngineError(f"the engine returned {counts}; every token needs one, row by row")

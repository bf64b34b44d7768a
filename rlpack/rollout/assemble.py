"""Make rows of the rollout batch from trajectories; no other code does.

Invariants (tests/unit/rollout/test_assemble.py):

1. `input_ids` of a row are its segments end to end, nothing added or left out;
2. `response_mask` is true only on sampled tokens, because they were sampled and never because of their values;
3. `rollout_logprobs` and `policy_version` belong to the same tokens as the mask, and are 0 and -1 elsewhere;
4. `oldest_version` and `version_counts` count the tokens of each row in `policy_version`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.copying import copy_runs
from rlpack.batch.ragged import Ragged
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import TrajectoryBatch
from rlpack.rollout.version_counts import version_columns


def assemble(
    trajectories: TrajectoryBatch,
    *,
    group_ids: Tensor,
    uids: Sequence[str],
    vocab_size: int | None = None,
    policy_version: int | None = None,
) -> BatchedDataDict:
    """Return the rollout batch, one row per trajectory.

    Columns: `input_ids`, `response_mask`, `rollout_logprobs`, `policy_version` (int32) per token; `prompt_lengths` (the
    tokens before the first sampled segment), `response_lengths` (sampled tokens), `group_ids`, `finish_reason`, `uid`
    per row; and `oldest_version` and `version_counts` per row (`rlpack.rollout.version_counts`). A row with an empty
    response has a mask that is all false.

    Args:
        trajectories: B rows.
        group_ids: rows with the same id are samples of one prompt, int64 [B].
        uids: names of the prompts in their dataset, B.
        vocab_size: token ids have to be below it; None only checks for negative ids.
        policy_version: the newest version that can have sampled a token; None only checks for negative versions.

    Raises:
        EngineError: the row counts differ, a token id is outside the vocabulary, a log-prob is NaN, infinite or above
            0, or a policy version can't have sampled its token.
    """
    counts = (trajectories.num_rows, group_ids.shape[0], len(uids))
    if len(set(counts)) > 1:
        raise EngineError(f"trajectories, group ids and uids have {counts} rows; they need the same number")
    segments = trajectories.token_ids
    check_trajectories(trajectories, vocab_size=vocab_size, policy_version=policy_version)
    lengths = _sum_by_row(segments.lengths, trajectories)
    is_sampled = torch.ones_like(trajectories.logprobs, dtype=torch.bool)
    mask = Ragged(_spread(is_sampled, trajectories, 0), lengths)
    versions = Ragged(_spread(trajectories.policy_versions, trajectories, -1), lengths)
    return BatchedDataDict(
        {
            "input_ids": Ragged(segments.values, lengths),
            "response_mask": mask,
            "rollout_logprobs": Ragged(_spread(trajectories.logprobs, trajectories, 0), lengths),
            "policy_version": versions,
            **version_columns(versions),
            "prompt_lengths": _sum_by_row(segments.lengths * _is_leading(trajectories), trajectories),
            "response_lengths": mask.count_nonzero(),
            "group_ids": group_ids,
            "finish_reason": list(trajectories.finish_reasons),
            "uid": list(uids),
        }
    )


def check_trajectories(
    trajectories: TrajectoryBatch, *, vocab_size: int | None = None, policy_version: int | None = None
) -> None:
    """Check values that an engine returned; arguments as for `assemble`.

    Raises:
        EngineError: a token id is outside the vocabulary, a log-prob is NaN, infinite or above 0, or a policy version
            can't have sampled its token.
    """
    _check_values(trajectories, vocab_size)
    _check_versions(trajectories, policy_version)


def _spread(values: Tensor, trajectories: TrajectoryBatch, fill: int) -> Tensor:
    """Expand a column of the sampled tokens to all tokens, [T]; the others get `fill`."""
    segments, is_sampled = trajectories.token_ids, trajectories.is_sampled
    column = torch.full(segments.values.shape, fill, dtype=values.dtype)
    lengths = segments.lengths[is_sampled]
    copy_runs(values, column, lengths.cumsum(0) - lengths, segments.offsets[:-1][is_sampled], lengths)
    return column


def _rows_of_segments(trajectories: TrajectoryBatch) -> Tensor:
    """Return the row of each segment, int64 [S]."""
    return torch.repeat_interleave(torch.arange(trajectories.num_rows), trajectories.num_segments)


def _sum_by_row(values: Tensor, trajectories: TrajectoryBatch) -> Tensor:
    """Sum a column of segments, int64 [S], over the segments of each row, int64 [B]."""
    return torch.zeros(trajectories.num_rows, dtype=torch.int64).index_add_(0, _rows_of_segments(trajectories), values)


def _is_leading(trajectories: TrajectoryBatch) -> Tensor:
    """Return which segments come before the first sampled one of their row, bool [S]."""
    sampled = trajectories.is_sampled.long()
    in_row = _sum_by_row(sampled, trajectories)
    before_row = (in_row.cumsum(0) - in_row)[_rows_of_segments(trajectories)]
    return sampled.cumsum(0) == before_row


def _check_values(trajectories: TrajectoryBatch, vocab_size: int | None) -> None:
    """Raise on token ids and log-probs that no model can return, naming the first row and segment."""
    tokens, logprobs = trajectories.token_ids.values, trajectories.logprobs
    largest = torch.iinfo(torch.int64).max if vocab_size is None else vocab_size - 1
    if tokens.numel() and not (tokens.min() >= 0 and tokens.max() <= largest):
        position = int(((tokens < 0) | (tokens > largest)).nonzero()[0])
        allowed = "0 or more" if vocab_size is None else f"from 0 to {largest}"
        text = f"token id {tokens[position].item()} {_place(trajectories, position)}; it has to be {allowed}"
        raise EngineError(text)
    # A NaN fails both comparisons.
    if logprobs.numel() and not (logprobs.max() <= 0 and logprobs.min() > -torch.inf):
        index = int((~((logprobs <= 0) & logprobs.isfinite())).nonzero()[0])
        place = _place_of_sampled(trajectories, index)
        raise EngineError(f"log-prob {logprobs[index].item()} {place}; it has to be finite and at most 0")


def _check_versions(trajectories: TrajectoryBatch, newest: int | None) -> None:
    """Raise on a policy version below 0 or above the newest, naming the first row and segment."""
    versions = trajectories.policy_versions
    largest = torch.iinfo(torch.int32).max if newest is None else newest
    if versions.numel() and not (versions.min() >= 0 and versions.max() <= largest):
        index = int(((versions < 0) | (versions > largest)).nonzero()[0])
        allowed = "0 or more" if newest is None else f"from 0 to {newest}, the weights that were published last"
        place = _place_of_sampled(trajectories, index)
        raise EngineError(f"policy version {versions[index].item()} {place}; it has to be {allowed}")


def _place_of_sampled(trajectories: TrajectoryBatch, index: int) -> str:
    """Return the segment and row of a sampled token, counted over the sampled tokens alone."""
    sampled = _spread(torch.ones_like(trajectories.logprobs, dtype=torch.bool), trajectories, 0)
    return _place(trajectories, int(sampled.nonzero()[index]))


def _place(trajectories: TrajectoryBatch, position: int) -> str:
    """Return the segment and row of a token, as text."""
    segment = int(trajectories.token_ids.segment_ids[position])
    row = int(_rows_of_segments(trajectories)[segment])
    index = segment - int(trajectories.num_segments[:row].sum())
    of_row = f" of row {row}" if trajectories.num_rows > 1 else ""  # the caller names a single one
    return f"in segment {index} ({trajectories.sources[segment]}){of_row}"

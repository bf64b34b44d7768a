"""Model inputs from a microbatch of rows, in any of the three batching modes.

Letters: T real tokens, N slots of the microbatch (padding included), R rows.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict, MicrobatchView
from rlpack.batch.errors import DataError
from rlpack.models.attention import SegmentKeys, Segments
from rlpack.models.cpu_products import rounded_rows


@dataclass(frozen=True)
class ModelInputs:
    """One microbatch, ready for the model.

    Attributes:
        input_ids: int64 [1, N] when packed, [R, N/R] when padded.
        position_ids: int64, shaped like input_ids; they restart at each sequence.
        packed: the segments of the packed row; None when rows are right-padded.
        slots: int64 [T], the flat slot of each real token, in row order. Rows that share a prompt have its slots in
            common.
        row_lengths: int64 [R], real tokens of each row.
    """

    input_ids: Tensor
    position_ids: Tensor
    packed: Segments | None
    slots: Tensor
    row_lengths: Tensor

    @property
    def num_tokens(self) -> int:
        """Return T, the number of real tokens."""
        return self.slots.shape[0]

    def has_context(self) -> Tensor:
        """Return bool [T], false at each row's first token.

        >>> pack_rows([torch.tensor([5, 6]), torch.tensor([7])]).has_context().tolist()
        [False, True, False]
        """
        mask = torch.ones(self.num_tokens, dtype=torch.bool, device=self.slots.device)
        starts = self.row_lengths.cumsum(0) - self.row_lengths
        mask[starts[self.row_lengths > 0]] = False
        return mask

    def to(self, device: torch.device | str) -> "ModelInputs":
        """Return a copy on a device."""
        packed = None if self.packed is None else self.packed.to(device)
        tensors = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "position_ids", "slots", "row_lengths")
        }
        return replace(self, packed=packed, **tensors)


def to_model_inputs(view: MicrobatchView, *, device: torch.device | str, pad_token_id: int = 0) -> ModelInputs:
    """Lay out a microbatch's `input_ids` as its plan says.

    Args:
        view: a microbatch of a shard; a dummy microbatch has no rows.
        device: the model's device.
        pad_token_id: fills the slots without a token; no real token sees them.

    Raises:
        DataError: rows are to share a prompt, and their first tokens differ.
    """
    layout, ragged = view.layout, view.rows["input_ids"]
    row_lengths = ragged.lengths.to(dtype=torch.int64, device="cpu")
    if 0 in layout.shape:
        return _one_empty_slot(row_lengths, packed=layout.cu_seqlens is not None, pad_token_id=pad_token_id).to(device)
    slots, position_ids = torch.from_numpy(layout.slots), torch.from_numpy(layout.position_ids)
    packed = None
    if layout.cu_seqlens is not None:
        # On some CPUs every layer would round the number of slots up; dummy sequences at the end do it once. They are
        # no longer than the others, because a model may have positions for those only.
        width, lengths = layout.shape[1], (layout.cu_seqlens[1:] - layout.cu_seqlens[:-1]).tolist()
        missing = rounded_rows(width) - width if torch.device(device).type == "cpu" else 0
        longest = max(lengths)
        dummies = [*[longest] * (missing // longest), missing % longest]
        packed = Segments.from_lengths([*lengths, *dummies])
        if layout.key_lengths is not None and layout.key_slots is not None:
            packed = replace(packed, keys=_keys(layout.key_lengths, layout.key_slots, width, dummies))
        position_ids = torch.cat([position_ids, torch.arange(missing)[None] % longest], 1)
        # Padding has no larger positions than rows: a model may have, or keep its rotary frequencies for, those only.
        position_ids = position_ids.clamp(max=int(layout.position_ids.ravel()[layout.slots].max(initial=0)))
    input_ids = torch.full(position_ids.shape, pad_token_id, dtype=torch.int64)
    values = ragged.values.to(dtype=torch.int64, device="cpu")
    input_ids.view(-1)[slots] = values
    if packed is not None and packed.keys is not None:
        _check_prompts(view.rows, input_ids.view(-1)[slots] == values)
    inputs = ModelInputs(
        input_ids=input_ids,
        position_ids=position_ids,
        packed=packed,
        slots=slots,
        row_lengths=row_lengths,
    )
    return inputs.to(device)


def _check_prompts(rows: BatchedDataDict, is_kept: Tensor) -> None:
    """Check that rows that share slots have the same tokens there.

    Args:
        rows: the microbatch's rows.
        is_kept: whether each token is the one in its slot, bool [T].

    Raises:
        DataError: a token differs from the one that another row has put into its slot.
    """
    if is_kept.all():
        return
    ragged = rows["input_ids"]
    row = int(torch.repeat_interleave(ragged.lengths.cpu())[~is_kept][0])
    of_group = f" of group {int(rows['group_ids'][row])}" if "group_ids" in rows else ""
    raise DataError(
        f"row {rows.row_ids[row]}{of_group} shares its prompt with another row of its group, but a token within their "
        "prompt_lengths differs; give such rows separate groups, or set batching.share_prompts=false"
    )


def _keys(lengths: np.ndarray, slots: np.ndarray, width: int, dummies: list[int]) -> SegmentKeys:
    """Return the keys of the segments of a layout of `width` slots, and of the dummy sequences after it."""
    places = np.append(slots, width + np.arange(sum(dummies)))
    return SegmentKeys(Segments.from_lengths([*lengths.tolist(), *dummies]), torch.from_numpy(places))


def pack_rows(rows: list[Tensor]) -> ModelInputs:
    """Pack a few rows without a plan.

    >>> pack_rows([torch.tensor([5, 6]), torch.tensor([7])]).position_ids.tolist()
    [[0, 1, 0]]
    """
    lengths = [row.shape[0] for row in rows]
    if sum(lengths) == 0:
        return _one_empty_slot(torch.tensor(lengths, dtype=torch.int64), packed=True, pad_token_id=0)
    values = torch.cat(rows)
    return ModelInputs(
        input_ids=values.unsqueeze(0),
        position_ids=torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        packed=Segments.from_lengths(lengths),
        slots=torch.arange(values.shape[0]),
        row_lengths=torch.tensor(lengths),
    )


def pad_rows(rows: list[Tensor]) -> ModelInputs:
    """Pad a few rows on the right, without a plan.

    >>> pad_rows([torch.tensor([5, 6]), torch.tensor([7])]).slots.tolist()
    [0, 1, 2]
    """
    width = max(row.shape[0] for row in rows)
    slots = torch.cat([torch.arange(row.shape[0]) + index * width for index, row in enumerate(rows)])
    return ModelInputs(
        input_ids=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        position_ids=torch.arange(width).expand(len(rows), width),
        packed=None,
        slots=slots,
        row_lengths=torch.tensor([row.shape[0] for row in rows]),
    )


def equal_rows(token_ids: Tensor) -> ModelInputs:
    """Lay out rows of equal length, int64 [R, L], side by side without packing.

    >>> equal_rows(torch.tensor([[5, 6], [7, 8]])).slots.tolist()
    [0, 1, 2, 3]
    """
    num_rows, width = token_ids.shape
    return ModelInputs(
        input_ids=token_ids,
        position_ids=torch.arange(width).expand(num_rows, width),
        packed=None,
        slots=torch.arange(num_rows * width),
        row_lengths=torch.full((num_rows,), width),
    )


def _one_empty_slot(row_lengths: Tensor, *, packed: bool, pad_token_id: int) -> ModelInputs:
    """Return inputs of one padding slot, for rows without tokens: layers can't reshape empty tensors."""
    return ModelInputs(
        input_ids=torch.full((1, 1), pad_token_id, dtype=torch.int64),
        position_ids=torch.zeros(1, 1, dtype=torch.int64),
        packed=Segments.from_lengths([1]) if packed else None,
        slots=torch.zeros(0, dtype=torch.int64),
        row_lengths=row_lengths,
    )

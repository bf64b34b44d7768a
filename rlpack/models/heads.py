"""Scalar heads, one value per token: the value head of a critic, the score head of a reward model.

Letters: T real tokens of the microbatch, N slots (padding included), d hidden size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rlpack.models.errors import ModelError
from rlpack.models.inputs import ModelInputs
from rlpack.models.packed import PackedModel
from rlpack.models.row_parts import RowPart, own_places


class ScalarHead(nn.Linear):
    """A linear layer with one output that computes in fp32, whatever the dtype of its weights.

    A product in bf16 would round values and scores to 8 significant bits, so that those from 8 to 16 would be multiples
    of 1/16.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the scalars of hidden states of any dtype, [..., d]: fp32 [..., 1], fp64 if the weights are."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.weight.to(dtype), bias)


class ScalarHeadModel(PackedModel):
    """A headless language model and a linear head with one output.

    Attributes:
        head: maps hidden states to the scalar; fp32 like all weights.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Linear | None = None) -> None:
        """Combine a model and a head.

        Args:
            model: without a head (`base_model`).
            head: becomes a `ScalarHead` in place, because weights may still be loaded into the classifier that has it;
                None creates one of zeros, so a new critic predicts 0 for every token.
        """
        super().__init__(model)
        # A new head gets its values here, even if the model has no weights yet.
        device = torch.device("cpu") if model.device.type == "meta" else model.device
        self.head: nn.Linear = ScalarHead(hidden_size(model), 1, dtype=model.dtype, device=device)
        if head is None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        else:
            head.__class__ = ScalarHead
            self.head = head

    @property
    def pattern_root(self) -> nn.Module:
        """Return this module, whose names cover the language model and the head."""
        return self

    def forward(self, inputs: ModelInputs, *, before_token: bool) -> Tensor:
        """Return a scalar for each real token of a microbatch, in row order: fp32 [T].

        Pipeline stages other than the last return placeholders.

        Args:
            inputs: the microbatch; the result is the same whether packed or padded.
            before_token: if true, entry t is read at token t - 1 and does not depend on token t (a value estimate); it
                is 0 at a row's first token. If false, entry t is read at token t: a row's score is its last entry.
        """
        part = self.row_part(inputs)
        hidden = self.hidden_states(inputs, part)
        if not self.has_outputs:
            return self.placeholders(hidden, inputs.num_tokens)
        scalars = self._in_row_order(inputs, part, self.head(hidden)[:, 0])
        if not before_token:
            return scalars
        # In row order the previous entry is the previous token's, except at a row's first token.
        shifted = torch.cat([scalars.new_zeros(1), scalars])[:-1]
        return torch.where(inputs.has_context(), shifted, 0.0)

    def probe(self, inputs: ModelInputs) -> Tensor:
        """Return the hidden states of all tokens, [T, d].

        Outputs of a new head are all zero, so they would prove nothing.
        """
        part = self.row_part(inputs)
        hidden = self.hidden_states(inputs, part)
        if not self.has_outputs:  # with tensor parallelism, `hidden` has only a part of the tokens
            placeholders = self.placeholders(hidden, inputs.num_tokens)
            return self.shared(placeholders[:, None].expand(-1, hidden.shape[-1]))
        return self.shared(self._in_row_order(inputs, part, hidden))

    def _in_row_order(self, inputs: ModelInputs, part: RowPart | None, of_slots: Tensor) -> Tensor:
        """Return the values of all real tokens, fp32 [T, ...], from those of this rank's slots, [n, ...]."""
        if self.split is None:
            return of_slots[inputs.slots].float()
        own, sources = own_places(part, inputs.slots)
        values = of_slots[sources].float()
        places = torch.arange(inputs.num_tokens, device=values.device)[own]
        return self.split.total(values.new_zeros(inputs.num_tokens, *values.shape[1:]).index_copy(0, places, values))

    def probe_wrapped_model(self, rows: Tensor) -> Tensor:
        """Return the hidden states [R, L, d] of rows of equal length by the wrapped model's own forward."""
        with self.whole_tokens():
            return self.shared(self.model(input_ids=rows, use_cache=False).last_hidden_state.float())


def hidden_size(model: PreTrainedModel) -> int:
    """Return d, the width of the hidden states after the last layer.

    Some OPT models project them from `hidden_size` to the width of their embeddings.

    Raises:
        ModelError: the model's config doesn't name it.
    """
    config = model.config.get_text_config()
    try:
        return config.to_dict().get("word_embed_proj_dim") or config.hidden_size
    except AttributeError as error:
        raise ModelError(
            f"{type(model).__name__} has no hidden_size in its config, so it can't get a value or score head; use "
            "another model"
        ) from error

"""Numbers for tokens instead of words: the value head of a critic, the score head of a reward model.

Letters: T real tokens of the microbatch, N slots (padding included), d hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpack.models.inputs import ModelInputs
from rlpack.models.packed import PackedModel


class TokenHead(PackedModel):
    """A language model without its own head, and a linear head that gives one number for each token.

    Attributes:
        head: from hidden states to the number, fp32 like all weights.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Linear | None = None) -> None:
        """Take the parts.

        Args:
            model: without a head of its own (`base_model`).
            head: None makes one of zeros, so that a new critic says 0 of everything, and learns from there.
        """
        super().__init__(model)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype, device=model.device)
        if head is None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        else:
            self.head = head

    @property
    def pattern_root(self) -> nn.Module:
        """Return this module, whose names cover the language model and the head."""
        return self

    def forward(self, inputs: ModelInputs, *, before: bool) -> Tensor:
        """Return a number for each real token of a microbatch, in row order: fp32 [T].

        Args:
            inputs: the microbatch; packed or padded, the result is the same flat column.
            before: whether entry t is read where token t - 1 is, and so knows nothing of token t: the value of what
                lies before t, 0 at a row's first token. If not, it is read at t itself: the score of a row is that of
                its last token.
        """
        numbers = self.head(self.hidden(inputs))[:, 0].float()[inputs.slots]
        if not before:
            return numbers
        # Shifted by one: the neighbour in row order is the token before, except at a row's first.
        shifted = torch.cat([numbers.new_zeros(1), numbers])[:-1]
        return torch.where(inputs.not_first(), shifted, 0.0)

    def probe(self, inputs: ModelInputs) -> Tensor:
        """Return the hidden states of all tokens, [T, d]: a new head's numbers would all be alike."""
        return self.hidden(inputs)[inputs.slots].float()

    def probe_wrapped_model(self, row: Tensor) -> Tensor:
        """Return the hidden states of one row by the wrapped model's own forward, [L, d]."""
        positions = torch.arange(row.shape[0], device=row.device).unsqueeze(0)
        states = self.model(input_ids=row.unsqueeze(0), position_ids=positions, use_cache=False).last_hidden_state
        return states[0].float()

"""The policy: a causal language model that scores given tokens by their log-probabilities.

Letters: T real tokens of the microbatch, N slots (padding included), P selected tokens, d hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpack.models.errors import ModelError
from rlpack.models.inputs import ModelInputs
from rlpack.models.logprobs import linear_logprobs
from rlpack.models.packed import PackedModel

# Config keys of models that scale their logits, which is not supported; 1 changes nothing.
_LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")


class TokenScores(NamedTuple):
    """The policy's scores of each real token of a microbatch, in row order.

    A named tuple, because FSDP2 finds the tensors of a module's output only in standard containers.

    Attributes:
        logprobs: fp32 [T]; entry t is log p(token t | the row's tokens before it), 0 where not selected.
        entropy: fp32 [T], nats, of the distribution of token t; 0 where not selected or not requested.
    """

    logprobs: Tensor
    entropy: Tensor


class Policy(PackedModel):
    """A transformers model whose output head runs through `linear_logprobs`.

    Attributes:
        chunk: maximum number of tokens whose logits exist at one time.
    """

    def __init__(self, model: PreTrainedModel, *, chunk: int = 1024) -> None:
        super().__init__(model)
        settings = model.config.get_text_config().to_dict()
        for name in _LOGIT_SCALES:
            if settings.get(name) not in {None, 1}:
                kind = type(model).__name__
                raise ModelError(f"{kind} has {name}={settings[name]}; only models with plain logits can be trained")
        self.chunk = chunk
        self._softcap: float | None = settings.get("final_logit_softcapping")

    def forward(
        self,
        inputs: ModelInputs,
        *,
        select: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = True,
    ) -> TokenScores:
        """Score the tokens of a microbatch; the result is the same whether packed or padded.

        A dummy microbatch, which has no real tokens, runs through the whole model too, so no rank misses a collective;
        its scores are empty and its gradients exactly zero.

        Args:
            inputs: the microbatch.
            select: bool [T]; only these tokens pass through the head. None selects all but each row's first.
            temperature: of the distribution.
            entropy: whether to compute entropies.
        """
        hidden = self.hidden_states(inputs)
        selected = inputs.has_context() if select is None else inputs.has_context() & select
        targets = selected.nonzero()[:, 0]  # [P]
        # A token is predicted from the slot of the previous token, which precedes it in row order.
        sources = inputs.slots[targets - 1]
        labels = inputs.input_ids.flatten()[inputs.slots[targets]]
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        logprobs, entropies = linear_logprobs(
            hidden.index_select(0, sources),
            head.weight,
            labels,
            temperature=temperature,
            chunk=self.chunk,
            softcap=self._softcap,
            bias=head.bias,
            entropy=entropy,
        )
        zeros = logprobs.new_zeros(inputs.num_tokens)
        return TokenScores(zeros.index_copy(0, targets, logprobs), zeros.index_copy(0, targets, entropies))

    def probe(self, inputs: ModelInputs) -> Tensor:
        """Return the log-probs of all tokens, [T]."""
        return Policy.forward(self, inputs, entropy=False).logprobs

    def probe_wrapped_model(self, row: Tensor) -> Tensor:
        """Return one row's log-probs [L] by the wrapped model's own head.

        Holds [L, V]; for short rows only.
        """
        positions = torch.arange(row.shape[0], device=row.device).unsqueeze(0)
        logits = self.model(input_ids=row.unsqueeze(0), position_ids=positions, use_cache=False).logits[0, :-1]
        scores = logits.float().log_softmax(-1).gather(1, row[1:, None])[:, 0]
        return torch.cat([scores.new_zeros(1), scores])

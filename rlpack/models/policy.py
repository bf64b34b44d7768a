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
from rlpack.models.outer_units import call_gathered
from rlpack.models.output_map import OutputMap, measure_output_map, run_measured_tokens
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.row_parts import own_places
from rlpack.models.weight_split import VocabularyPart, first_rows


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
        output_map: what the model does around its output layer.
    """

    _head_is_split = True

    def __init__(self, model: PreTrainedModel, *, chunk: int = 1024) -> None:
        """Wrap a model.

        Args:
            model: unsharded; a few tokens run through it. If it is on the meta device, call `measure_outputs` once it
                has its weights.
            chunk: maximum number of tokens whose logits exist at one time.

        Raises:
            ModelError: its log-probs can't be computed from a linear output layer.
        """
        super().__init__(model)
        self.chunk = chunk
        self.output_map: OutputMap = measure_output_map(model, output_head(model))

    def measure_outputs(self) -> None:
        """Measure what the model does around its output layer; a collective if sharded.

        Raises:
            ModelError: its log-probs can't be computed from a linear output layer.
        """
        if self.has_outputs:
            self.output_map = self.run(lambda: measure_output_map(self.model, output_head(self.model)))
        else:
            self.run(lambda: run_measured_tokens(self.model))

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
        its scores are empty and its gradients exactly zero. Pipeline stages other than the last return placeholders.

        Args:
            inputs: the microbatch.
            select: bool [T]; only these tokens pass through the head. None selects all but each row's first.
            temperature: temperature of the distribution.
            entropy: whether to compute entropies.
        """
        part = self.row_part(inputs)
        hidden = self.hidden_states(inputs, part)
        if not self.has_outputs:
            placeholders = self.placeholders(hidden, inputs.num_tokens)
            return TokenScores(placeholders, torch.zeros_like(placeholders))
        selected = inputs.has_context() if select is None else inputs.has_context() & select
        targets = selected.nonzero()[:, 0]  # [P]
        # A token is predicted from the slot of the previous token, which precedes it in row order.
        sources = inputs.slots[targets - 1]
        own, sources = own_places(part, sources)
        targets = targets[own]
        labels = inputs.input_ids.flatten()[inputs.slots[targets]]
        states = hidden.index_select(0, sources)
        logprobs, entropies = self.score_states(states, labels, temperature=temperature, entropy=entropy)
        zeros = logprobs.new_zeros(inputs.num_tokens)
        scores = TokenScores(zeros.index_copy(0, targets, logprobs), zeros.index_copy(0, targets, entropies))
        if self.split is None or self.split.group is None:
            return scores
        # Copies, because FSDP2's hooks on outputs don't survive operations in place on views.
        return TokenScores(*(score.clone() for score in self.split.total(torch.stack(scores)).unbind()))

    def score_states(
        self, states: Tensor, labels: Tensor, *, temperature: float = 1.0, entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probs of labels by the output layer, and entropies: both fp32 [P].

        Args:
            states: hidden states of the slots before the labels, after the last norm, [P, d].
            labels: int64 [P].
            temperature: temperature of the distribution.
            entropy: whether to compute entropies.
        """
        rule = self.output_map
        if rule.hidden_scale != 1.0:
            states = states * rule.hidden_scale
        head = output_head(self.model)

        def score(states: Tensor) -> tuple[Tensor, Tensor]:
            weight, bias, vocabulary = self._output_layer(head)
            return linear_logprobs(
                # Some models keep the sum over layers, and so the hidden state, in fp32.
                states.to(weight.dtype),
                weight,
                labels,
                # The scale in cap·tanh(scale·x / cap) / temperature is folded into temperature and cap.
                temperature=temperature / rule.scale,
                chunk=self.chunk,
                softcap=None if rule.softcap is None else rule.softcap / rule.scale,
                bias=bias,
                entropy=entropy,
                part=vocabulary,
            )

        return call_gathered(head, score, states)

    def _output_layer(self, head: nn.Linear) -> tuple[Tensor, Tensor | None, VocabularyPart | None]:
        """Return weight and bias of the logits that are used, or this rank's rows of them and its place."""
        num_logits = self.output_map.num_logits
        if self.weight_split is not None:
            return self.weight_split.output_layer(head, num_logits)
        bias = None if head.bias is None else first_rows(head.bias, num_logits)
        return first_rows(head.weight, num_logits), bias, None

    def probe(self, inputs: ModelInputs) -> Tensor:
        """Return the log-probs of all tokens, [T]."""
        return self.shared(Policy.forward(self, inputs, entropy=False).logprobs)

    def probe_wrapped_model(self, rows: Tensor) -> Tensor:
        """Return the log-probs [R, L] of rows of equal length by the wrapped model's own head.

        Materializes all logits, [R, L, V]; for few tokens only.
        """
        if not self.has_outputs:
            with self.whole_tokens():
                hidden = language_model(self.model)(input_ids=rows, use_cache=False).last_hidden_state
            return self.shared(self.placeholders(hidden, rows.numel()).view(rows.shape))
        with self.whole_tokens():
            logits = self.model(input_ids=rows, use_cache=False).logits[:, :-1]
        scores = logits.float().log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
        return self.shared(torch.cat([scores.new_zeros(rows.shape[0], 1), scores], 1))


def output_head(model: PreTrainedModel) -> nn.Linear:
    """Return the linear layer that maps hidden states to logits.

    Raises:
        ModelError: the model has another kind of head.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear output layer (it has {type(head).__name__}), so its log-probs can't "
            "be computed; use another model"
        )
    return head

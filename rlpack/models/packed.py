"""The base of policy and critic: a transformers model that runs microbatches, in one module for FSDP2.

Letters: T real tokens of the microbatch, N slots (padding included), d hidden size.
"""

from typing import Self

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlpack.models.adapters import is_adapter_dropout
from rlpack.models.errors import ModelError
from rlpack.models.inputs import ModelInputs


class PackedModel(nn.Module):
    """A transformers model and a head.

    Subclasses add the head, and define the outputs that packing is checked on.

    The model's dropout is never active, not even in training: responses are sampled without it, so the first ratio
    would not be 1, and the process's random state, which no checkpoint holds, would affect the weights. Dropout of
    adapters, which is off by default, is active in training, inside `rlpack.models.adapters.dropout_seed`.

    Attributes:
        model: the wrapped model, built with the `rlpack` attention.
        reshard_after_forward: whether gathered weights are freed after forward; set by `shard_model`.
        compute_dtype: dtype of the forward pass; set by `shard_model`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.reshard_after_forward = True
        self.compute_dtype = model.dtype

    @property
    def pattern_root(self) -> nn.Module:
        """Return the module whose weight names the configuration's patterns refer to: the wrapped model."""
        return self.model

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Return the hidden state of each slot after the last norm, [N, d].

        A dummy microbatch, which has no real tokens, runs through the whole model too, so no rank misses a collective.
        """
        outputs = self.model.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            packed=inputs.packed,
            use_cache=False,
        )
        return outputs.last_hidden_state.flatten(0, 1)

    def probe(self, inputs: ModelInputs) -> Tensor:
        """Return the outputs that the isolation check compares, in row order: [T] or [T, d]."""
        raise NotImplementedError(f"{type(self).__name__} has no outputs to check; add probe")

    def probe_wrapped_model(self, row: Tensor) -> Tensor:
        """Return one row's outputs by the wrapped model's own forward, as ground truth."""
        raise NotImplementedError(f"{type(self).__name__} has no ground truth to check; add probe_wrapped_model")

    def train(self, mode: bool = True) -> Self:
        """Set the mode of activation checkpointing and adapters' dropout; all else stays in evaluation mode."""
        super().train(False)
        self.training = mode
        for name, module in self.named_modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = mode and module.gradient_checkpointing
            elif is_adapter_dropout(name):
                module.training = mode
        return self

    def checkpoint_activations(self, role: str = "actor") -> None:
        """Keep only each decoder layer's input for the backward pass, which recomputes the rest.

        Args:
            role: the model's role, for the error.

        Raises:
            ModelError: the model's config has dropout, which checkpointed layers may apply.
        """
        settings = self.model.config.get_text_config().to_dict()
        for name, value in settings.items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and value > 0:
                kind = type(self.model).__name__
                raise ModelError(
                    f"{kind} has {name}={value}, which {role}.gradient_checkpointing=true would turn on; set it to 0 "
                    f"in the model's config, or set {role}.gradient_checkpointing=false"
                )
        options = {"use_reentrant": False}
        if "activation_checkpointing_enable" in dir(self.model):
            self.model.activation_checkpointing_enable(options)
        else:  # transformers before the new name
            self.model.gradient_checkpointing_enable(options)

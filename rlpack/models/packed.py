"""What a policy and a critic have in common: a transformers model that eats microbatches, in one module for FSDP2.

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
    """A transformers model and a head of ours. A subclass has the head, and says what packing is checked on.

    The model's dropout never acts, not in an update either: responses are sampled without it, so with it the first
    ratio would not be 1; and the process's random state, which no checkpoint holds, would come into the weights. That
    of adapters, which has to be asked for, acts while training, inside `rlpack.models.adapters.dropout_seed`.

    Attributes:
        model: the wrapped model, built with the `rlpack` attention.
        reshard_after_forward: whether gathered weights are freed after forward; `shard_model` sets it.
        compute_dtype: type of the forward pass; `shard_model` lowers it.
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

    def hidden(self, inputs: ModelInputs) -> Tensor:
        """Return the hidden state of each slot, after the last norm, [N, d].

        A filler, which has no real token, runs through the whole model all the same, so that no rank misses a
        collective.
        """
        outputs = self.model.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            packed=inputs.packed,
            use_cache=False,
        )
        return outputs.last_hidden_state.flatten(0, 1)

    def probe(self, inputs: ModelInputs) -> Tensor:
        """Return what the isolation check looks at for each real token, in row order: [T] or [T, d]."""
        raise TypeError(f"{type(self).__name__} does not say what its isolation is checked on; give it a probe")

    def probe_wrapped_model(self, row: Tensor) -> Tensor:
        """Return the same for one row [L] by the wrapped model's own forward: the truth to check against."""
        raise TypeError(
            f"{type(self).__name__} does not say what its isolation is checked on; give it an probe_wrapped_model"
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode that activation checkpointing and adapters' dropout go by; all else stays as in evaluation."""
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
            role: whose settings ask for it, for the error.

        Raises:
            ModelError: the model's config has a dropout; a layer that is checkpointed may apply it.
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

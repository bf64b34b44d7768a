"""The base of policy and critic: a transformers model that runs microbatches, in one module for FSDP2.

Letters: T real tokens of the microbatch, N slots (padding included), d hidden size.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlpack.config.sections.compute import Checkpointing, Offload
from rlpack.models.adapters import is_adapter_dropout
from rlpack.models.compiled_graphs import CompiledGraphs
from rlpack.models.context_parallel import RowSplit
from rlpack.models.errors import ModelError
from rlpack.models.expert_parallel import ExpertSplit, expert_modules
from rlpack.models.inputs import ModelInputs
from rlpack.models.own_attention import forward_arguments
from rlpack.models.routing import current_pass, same_pass
from rlpack.models.row_parts import RowPart
from rlpack.models.selective_checkpointing import selective_contexts
from rlpack.models.stage_link import StageLink
from rlpack.models.virtual_stages import VirtualStages
from rlpack.models.weight_split import WeightSplit

T = TypeVar("T")

# Config keys of dropout in decoder layers, not in the heads of classifiers.
_LAYER_DROPOUT = re.compile(r"^(?!summary_|classifier_|cls_).*(dropout|pdrop)")


class PackedModel(nn.Module):
    """A transformers model and a head.

    Subclasses add the head, and define the outputs that isolation checks compare.

    The model's dropout is never active, not even in training: responses are sampled without it, so the first ratio
    would not be 1, and the process's random state, which no checkpoint holds, would affect the weights. Dropout of
    adapters, which is off by default, is active in training, inside `rlpack.models.adapters.dropout_seed`.

    Attributes:
        model: the wrapped model: with the `rlpack` attention to run packed rows, else with transformers' own.
        reshard_after_forward: whether gathered weights are freed after forward; set by `shard_model`.
        compute_dtype: dtype of the forward pass; set by `shard_model`.
        offload: what is kept in host memory; set by `shard_model`.
        split: the group whose ranks share each microbatch's tokens (`rlpack.models.context_parallel`); None for none.
        weight_split: the group whose ranks share each layer's weights (`rlpack.models.tensor_parallel`); None for none.
        expert_split: the ranks that divide each layer's experts (`rlpack.models.expert_parallel`); None for none.
        compiled: counts the graphs of compiled layers (`rlpack.models.compiled_layers`); None if they aren't compiled.
        stage: this rank's place among the pipeline's stages (`rlpack.models.pipeline_parallel`); None without stages.
        virtual_stages: the runs of layers of this rank, if it has several; None if it has one.
    """

    # Whether each rank's gradients of the hidden states are summands, because its head has a part of the weights.
    _head_is_split = False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.reshard_after_forward = True
        self.compute_dtype = model.dtype
        self.offload: Offload = "none"
        self.split: RowSplit | None = None
        self.weight_split: WeightSplit | None = None
        self.expert_split: ExpertSplit | None = None
        self.compiled: CompiledGraphs | None = None
        self.stage: StageLink | None = None
        self.virtual_stages: VirtualStages | None = None
        self._whole: tuple[Self, ...] = ()  # not a submodule
        self._stages_of: dict[str, list[int]] = {}

    @property
    def pattern_root(self) -> nn.Module:
        """Return the module whose weight names the configuration's patterns refer to: the wrapped model."""
        return self.model

    @property
    def uncut(self) -> Self:
        """Return the model with the layers of all stages: itself, or its copy on the meta device."""
        return self._whole[0] if self._whole else self

    @property
    def has_outputs(self) -> bool:
        """Whether this rank has the head and thus the outputs; with virtual stages, whether the active one does."""
        if self.stage is None or not self.stage.is_last:
            return self.stage is None
        return self.virtual_stages is None or self.virtual_stages.has_last

    @property
    def active_virtual_stage(self) -> int:
        """Return the virtual stage that runs, 0 without one."""
        return 0 if self.virtual_stages is None else self.virtual_stages.active or 0

    def virtual_stage(self, number: int) -> AbstractContextManager[None]:
        """Return a context in which the model's forward pass runs a virtual stage alone; outside, it runs all."""
        return nullcontext() if self.virtual_stages is None else self.virtual_stages.running(number)

    def set_stage(
        self, link: StageLink, whole: Self, stages_of: dict[str, list[int]], virtual_stages: VirtualStages | None = None
    ) -> None:
        """Record the stage that this module now is.

        Args:
            link: this rank's stage.
            whole: the model before the cut, on the meta device.
            stages_of: the stages that have each weight of `stored_tensors`.
            virtual_stages: virtual stages of this rank, if it has several.
        """
        self.stage, self._whole, self._stages_of, self.virtual_stages = link, (whole,), stages_of, virtual_stages

    def stages_of(self, name: str) -> list[int]:
        """Return the stages that have a weight of `stored_tensors`; tied weights are on two."""
        return self._stages_of[name]

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and the buffers that a checkpoint holds; of tied ones the first."""
        yield from self.named_parameters()
        for name, buffer in self.named_buffers():
            module, _, own = name.rpartition(".")
            if own not in self.get_submodule(module)._non_persistent_buffers_set:
                yield name, buffer

    def shared(self, outputs: Tensor) -> Tensor:
        """Return the last stage's outputs on all stages; a collective."""
        return outputs if self.stage is None else self.stage.share(outputs)

    def worst_of_stages(self, gap: float, name: str) -> tuple[float, str]:
        """Return the largest gap of any stage and its name, NaN if any gap is; a collective."""
        if self.stage is None:
            return gap, name
        gaps = self.stage.gather((gap, name))
        return max(gaps, key=lambda pair: float("inf") if pair[0] != pair[0] else pair[0])

    def placeholders(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """Return zeros, fp32 [T], as the outputs of a stage that isn't the last; their gradient is ignored.

        Args:
            hidden: the result of `hidden_states`.
            num_tokens: T.
        """
        return hidden.flatten()[:1].float().expand(num_tokens).clone()  # FSDP2 warns about views

    def hidden_states(self, inputs: ModelInputs, part: RowPart | None) -> Tensor:
        """Return the hidden state of each of this rank's slots after the last norm, [n, d].

        These are all N slots, or with context parallelism those of `part`. Stages other than the last get zeros.
        A dummy microbatch, which has no real tokens, runs through the whole model too, so no rank misses a collective.
        Padded rows need no mask: padding comes last, where no real token sees it.

        Args:
            inputs: the microbatch.
            part: from `row_part`.
        """
        base, input_ids = language_model(self.model), inputs.input_ids
        if (routing := current_pass()) is not None:
            routing.place_tokens(inputs, part)
        if part is not None:
            input_ids = part.input_ids
            arguments = {"position_ids": part.position_ids, "packed": part.packed}
        elif inputs.packed is None:
            arguments = forward_arguments(base, position_ids=_padded_positions(inputs))
        else:
            arguments = {"position_ids": inputs.position_ids, "packed": inputs.packed}
        hidden = base(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state
        if self.weight_split is not None and self.has_outputs:
            hidden = self.weight_split.gather(hidden, summands=self._head_is_split)
        return hidden.flatten(0, 1)

    def row_part(self, inputs: ModelInputs) -> RowPart | None:
        """Return the slots that this rank runs the model on; None for all, as they are laid out."""
        if self.split is None:
            return None
        positions = inputs.position_ids if inputs.packed is not None else _padded_positions(inputs)
        return RowPart.of(replace(inputs, position_ids=positions), self.split)

    def run(self, function: Callable[[], T]) -> T:
        """Call `function`, which runs the wrapped model, and return its result; a collective if sharded.

        The model's own forward pass would not gather the weights outside its decoder layers.
        """
        with self.whole_tokens():
            return function()

    def whole_tokens(self) -> AbstractContextManager[None]:
        """Return a context in which the wrapped model's own forward pass can be called."""
        return nullcontext() if self.weight_split is None else self.weight_split.whole_tokens()

    def probe(self, inputs: ModelInputs) -> Tensor:
        """Return the outputs that the isolation check compares, in row order: [T] or [T, d]."""
        raise NotImplementedError(f"{type(self).__name__} has no outputs to check; add probe")

    def probe_wrapped_model(self, rows: Tensor) -> Tensor:
        """Return the outputs of rows of equal length by the wrapped model's own forward, as ground truth.

        Args:
            rows: int64 [R, L].

        Returns:
            What `probe` gives for each token: [R, L] or [R, L, d].
        """
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

    def checkpoint_activations(self, kind: Checkpointing = "full", role: str = "actor") -> None:
        """Have the backward pass recompute activations of the decoder layers; the gradients stay the same.

        Args:
            kind: `full` keeps only each layer's input; `selective` also keeps the outputs of costly operations
                (`rlpack.models.selective_checkpointing`); `none` does nothing.
            role: the model's role, for the error.

        Raises:
            ModelError: the model's config has dropout, which checkpointed layers may apply.
        """
        if kind == "none":
            return
        layers = {type(module) for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)}
        settings = self.model.config.get_text_config().to_dict() if any(map(_reads_its_mode, layers)) else {}
        for name, value in settings.items():
            if _LAYER_DROPOUT.search(name) and isinstance(value, float) and value > 0:
                model = type(self.model).__name__
                raise ModelError(
                    f"{model} has {name}={value}, which {role}.gradient_checkpointing={kind} would turn on; set it to "
                    f"0 in the model's config, or set {role}.gradient_checkpointing=none"
                )
        options: dict[str, Any] = {"use_reentrant": False}
        if kind == "selective":
            options["context_fn"] = partial(selective_contexts, f"{role}.gradient_checkpointing")
        if any(expert_modules(self)):
            options["context_fn"] = partial(same_pass, options.get("context_fn"))
        if not self.model.supports_gradient_checkpointing:
            raise ModelError(
                f"{type(self.model).__name__} can't recompute activations; set {role}.gradient_checkpointing=none"
            )
        if "activation_checkpointing_enable" in dir(self.model):
            self.model.activation_checkpointing_enable(options)
        else:  # transformers before the new name
            self.model.gradient_checkpointing_enable(options)


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that gives hidden states: itself, if it has no output layer."""
    base = model.base_model
    if base is model:  # its base_model_prefix names nothing
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        base = inner[0] if len(inner) == 1 and model.get_output_embeddings() is not None else model
    return cast(PreTrainedModel, base)


def _reads_its_mode(layer: type[nn.Module]) -> bool:
    """Return whether a decoder layer's own code depends on `training`, as it does if it calls F.dropout itself.

    In training only checkpointed layers are in training mode. Modules inside them, such as nn.Dropout, are not.
    """
    own = layer.__mro__[: layer.__mro__.index(GradientCheckpointingLayer)]
    try:
        return any("training" in inspect.getsource(kind) for kind in own)
    except (OSError, TypeError):  # a class without source, for example of a notebook
        return True


def _padded_positions(inputs: ModelInputs) -> Tensor:
    """Return the positions of right-padded rows, int64 [R, L].

    They continue through the padding, up to the longest row. transformers would take a jump for the boundary of a
    packed sequence, and build a mask for it.
    """
    num_rows, width = inputs.input_ids.shape
    longest = int(inputs.row_lengths.max()) if inputs.row_lengths.numel() else 1
    positions = torch.arange(width, device=inputs.input_ids.device).clamp(max=max(longest, 1) - 1)
    return positions.expand(num_rows, width)

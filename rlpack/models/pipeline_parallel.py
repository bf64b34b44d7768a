"""Pipeline parallelism: each stage holds some of the decoder layers, and passes hidden states on.

The first stage also has the embedding, the last one the final norm and the head. A stage is the family's own module
tree with placeholders for what other stages hold. Layers keep their indices, so weights keep their names and each layer
gets the mask and rotary frequencies of its place; and the family's own forward pass runs unchanged:

| module of another stage | placeholder |
|---|---|
| embedding | receives the hidden states of the previous stage |
| decoder layer | passes hidden states on |
| final norm | sends hidden states to the next stage |
| head | is never called |

Hidden states are received and sent in the model's forward pass, and their gradients in the backward pass of autograd.
A schedule (`rlpack.models.pipeline_schedule`) is then only the order in which a rank runs forward and backward passes.
Tied weights are on the first and the last stage, which add their gradients.

A rank can have several runs of layers, its virtual stages (`rlpack.models.virtual_stages`): of P ranks, rank r has the
runs r, r + P, r + 2 P and so on. Placeholders are then those of one virtual stage at a time. Everywhere else in the
code, a stage is a rank of the pipeline with all its layers, so `stages_of` returns ranks.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from rlpack.models.errors import ModelError
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.parts import local_part
from rlpack.models.stage_link import StageLink
from rlpack.models.stage_wiring import EMBEDDING, LAYERS, NORM, wiring_problem
from rlpack.models.virtual_stages import VirtualStages

M = TypeVar("M", bound=PackedModel)


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage; if uneven, the first stages get more, because the last one has the head.

    >>> stage_layers(5, 2)
    [range(0, 3), range(3, 5)]
    """
    size, larger = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, larger) for stage in range(num_stages + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def cut_model(model: M, link: StageLink, whole: M) -> None:
    """Keep one stage of a model, in place.

    Args:
        model: on any device, not sharded.
        link: this rank's stage.
        whole: the result of `meta_copy` for the model.

    Raises:
        ModelError: the model can't be cut.
    """
    if problem := wiring_problem(whole.model):
        raise ModelError(
            f"{type(whole.model).__name__} can't be cut into pipeline stages: {problem}; set *.parallel.pp=1"
        )
    base = language_model(model.model)
    layers = list(base.get_submodule(LAYERS).children())
    own = stage_layers(len(layers), link.num_stages * link.num_virtual)[link.rank :: link.num_stages]
    head, embedding = model.model.get_output_embeddings(), cast(nn.Embedding, base.get_submodule(EMBEDDING))
    is_tied = head is not None and head.weight is embedding.weight
    weight = embedding.get_parameter("weight") if is_tied and link.is_last else None
    received, sent = _Received(model, link, embedding.embedding_dim, weight), _Sent(link)
    virtual_stages = [
        {
            EMBEDDING: embedding if link.is_first and number == 0 else received,
            LAYERS: _only(layers, run),
            NORM: base.get_submodule(NORM) if link.is_last and number == len(own) - 1 else sent,
        }
        for number, run in enumerate(own)
    ]
    base.register_module(EMBEDDING, virtual_stages[0][EMBEDDING])
    base.register_module(LAYERS, _only(layers, [index for run in own for index in run]))
    base.register_module(NORM, virtual_stages[-1][NORM])
    if not link.is_last:
        heads = [(model, name) for name, child in model.named_children() if child is not model.model]
        if not (is_tied and link.is_first):
            heads += [(model.model, name) for name, child in model.model.named_children() if child is head]
        for parent, name in heads:
            parent.register_module(name, _Elsewhere())
    runs = VirtualStages(base, virtual_stages) if link.num_virtual > 1 else None
    model.set_stage(link, whole, _stages_of(whole, link), runs)


def _only(layers: Sequence[nn.Module], indices: Sequence[int]) -> nn.ModuleList:
    """Return the layers at these indices, and placeholders at the others."""
    return nn.ModuleList(layer if index in indices else PassOn(layer) for index, layer in enumerate(layers))


def _stages_of(whole: PackedModel, link: StageLink) -> dict[str, list[int]]:
    """Return the stages that have each weight of `stored_tensors`."""
    num_stages = link.num_stages
    base = language_model(whole.model)
    modules = [(base.get_submodule(EMBEDDING), 0)]
    layers = list(base.get_submodule(LAYERS).children())
    for number, own in enumerate(stage_layers(len(layers), num_stages * link.num_virtual)):
        modules += [(layers[index], number % num_stages) for index in own]
    stages: dict[int, list[int]] = {}
    for module, stage in modules:
        stages |= {id(tensor): [stage] for tensor in (*module.parameters(), *module.buffers())}
    head = whole.model.get_output_embeddings()
    for tensor in head.parameters() if isinstance(head, nn.Module) else ():
        stages[id(tensor)] = [*stages.get(id(tensor), []), num_stages - 1]  # tied weights are on two stages
    return {name: stages.get(id(tensor), [num_stages - 1]) for name, tensor in whole.stored_tensors()}


def add_tied_gradients(model: PackedModel) -> None:
    """Add the gradients of tied weights of the first and the last stage; a collective of these."""
    for weight in _tied_weights(model):
        assert model.stage is not None
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        model.stage.add_other_end(local_part(weight.grad))


def duplicate_weights(model: PackedModel) -> Sequence[Tensor]:
    """Return the weights that an earlier stage has, too."""
    return [] if model.stage is None or model.stage.is_first else _tied_weights(model)


def _tied_weights(model: PackedModel) -> list[nn.Parameter]:
    """Return the trained weights that both the first and the last stage have."""
    link = model.stage
    if link is None or not (link.is_first or link.is_last):
        return []
    return [
        weight for name, weight in model.named_parameters() if weight.requires_grad and len(model.stages_of(name)) > 1
    ]


def meta_copy(model: M, without: Sequence[nn.Module] = ()) -> M:
    """Return a copy of a model without values, on the meta device; before ranks share its weights.

    Args:
        model: on any device.
        without: decoder layers that are left out; the copy has placeholders that pass hidden states on.
    """
    memo: dict[int, Any] = {id(layer): PassOn(layer) for layer in without}
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


class PassOn(nn.Module):
    """A placeholder for a decoder layer that this rank doesn't have.

    It has the layer's plain attributes, such as a kind of attention, by which some models choose what a layer gets.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, int | float | str):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Return the hidden states as they are."""
        return hidden_states


class _Received(nn.Module):
    """The embedding of another stage: hidden states of the previous one, [R, L, d]."""

    def __init__(self, model: PackedModel, link: StageLink, size: int, weight: nn.Parameter | None) -> None:
        super().__init__()
        self._model, self._link, self._size = [model], link, size  # in a list, so that it isn't a submodule
        if weight is not None:  # the tied weight of the head
            self.weight = weight

    def forward(self, input_ids: Tensor) -> Tensor:
        rows, length = input_ids.shape
        split = self._model[0].weight_split
        parts = split.num_ranks if split is not None and split.splits_tokens else 1
        runs = self._model[0].virtual_stages
        return self._link.receive(rows, length // parts, self._size, after=None if runs is None else runs.previous)


class _Sent(nn.Module):
    """The final norm of another stage: hidden states go to the next one."""

    def __init__(self, link: StageLink) -> None:
        super().__init__()
        self._link = link

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._link.send(hidden_states)


class _Elsewhere(nn.Module):
    """A head of another stage."""

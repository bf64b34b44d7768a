"""Check that a model can be cut into pipeline stages: each layer reads what the previous one returns, and nothing else.

The model's own forward pass runs on the meta device, with stand-ins for embedding, layers and norm that record what
they get. That finds any operation between layers, such as Granite's scale of embeddings, and layers that read the
embeddings or the states of earlier layers. Stages would leave these out without an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpack.models import attention
from rlpack.models.own_attention import attention_implementation
from rlpack.models.packed import language_model

EMBEDDING, LAYERS, NORM = "embed_tokens", "layers", "norm"
_NUM_TOKENS = 4


class _Recorder:
    """What stand-ins got and returned, in order."""

    def __init__(self, size: int) -> None:
        self.names: list[str] = []
        self.problem: str | None = None
        self.last: Tensor | None = None
        self._made: list[Tensor] = []
        self._size = size

    def stand_in(self, name: str) -> Callable[..., Tensor]:
        """Return the forward pass of a stand-in, which returns a new tensor."""

        def forward(hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
            if self.names and hidden_states is not self.last:
                self.problem = self.problem or f"{name} doesn't get what {self.names[-1]} returns"
            for value in (*arguments, *options.values()):
                if isinstance(value, dict | list) or any(value is earlier for earlier in self._made):
                    self.problem = self.problem or f"{name} reads more than what {self.names[-1]} returns"
            self.names.append(name)
            self.last = torch.empty(1, _NUM_TOKENS, self._size, device="meta")
            self._made.append(self.last)
            return self.last

        return forward


def wiring_problem(model: PreTrainedModel) -> str | None:
    """Return why a model can't be cut into pipeline stages, None if it can.

    Args:
        model: on the meta device, with its output layer or without.
    """
    return _structure_problem(model) or _flow_problem(language_model(model))


def _structure_problem(model: PreTrainedModel) -> str | None:
    """Return a weight or module that no stage would have."""
    base = language_model(model)
    parts = dict(base.named_children())
    if not {EMBEDDING, LAYERS, NORM} <= parts.keys() or not isinstance(parts[LAYERS], nn.ModuleList):
        return f"{type(base).__name__} has no {EMBEDDING}, {LAYERS} and {NORM}"
    head = model.get_output_embeddings()
    inside = [*(parts[part] for part in (EMBEDDING, LAYERS, NORM)), *([head] if isinstance(head, nn.Module) else [])]
    known = {id(weight) for part in inside for weight in part.parameters()}
    if others := [name for name, weight in model.named_parameters() if id(weight) not in known]:
        return f"it has weights outside of embedding, layers, norm and head ({others[0]})"
    shared = _shared(parts[LAYERS])
    return None if shared is None else f"layers share the weight {shared}"


def _flow_problem(base: PreTrainedModel) -> str | None:
    """Return where the forward pass of a language model is more than embedding, layers and norm."""
    parts = dict(base.named_children())
    embedding, stack = cast(nn.Embedding, parts[EMBEDDING]), cast(nn.ModuleList, parts[LAYERS])
    layers = [(f"layer {index}", layer) for index, layer in enumerate(stack)]
    modules = [("the embedding", embedding), *layers, ("the norm", parts[NORM])]
    recorder = _Recorder(embedding.embedding_dim)
    try:
        attention.register()  # with this implementation, transformers builds no masks, for which it would read values
        with _replaced(modules, recorder), attention_implementation(base, attention.NAME), torch.no_grad():
            tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
            found = base(input_ids=tokens, use_cache=False).last_hidden_state
    except Exception as error:  # noqa: BLE001 - architectures fail in their own ways
        return f"its forward pass can't be followed ({type(error).__name__}: {error})"
    if recorder.problem is None and recorder.names != [name for name, _ in modules]:
        return "it doesn't run its layers once each, in order"
    if recorder.problem is None and found is not recorder.last:
        return "it changes what the norm returns"
    return recorder.problem


def _shared(layers: nn.Module) -> str | None:
    """Return the name of a weight that two layers have."""
    owners: dict[int, int] = {}
    for index, layer in enumerate(layers.children()):
        for name, weight in layer.named_parameters():
            if owners.setdefault(id(weight), index) != index:
                return f"{LAYERS}.{index}.{name}"
    return None


@contextmanager
def _replaced(modules: list[tuple[str, nn.Module]], recorder: _Recorder) -> Iterator[None]:
    """Run stand-ins in place of modules inside the context."""
    before = [vars(module).get("forward") for _, module in modules]
    try:
        for name, module in modules:
            module.forward = recorder.stand_in(name)
        yield
    finally:
        for (_, module), forward in zip(modules, before, strict=True):
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward

"""LoRA adapters that vLLM applies while it generates (`rollout.lora=adapter`): only their matrices are sent.

The base weights are frozen, so vLLM's copy stays equal to the trainer's; the canary verifies this at every publication.
Each update becomes an adapter with a new id, because vLLM keeps the old matrices for an id that it already has. vLLM
reads it from files, whose digest its process checks first (`adapter_files`).
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpack.batch.weight_layout import WeightLayout
from rlpack.config.sections.optimization import ADAPTER_RANKS
from rlpack.models.adapters import is_linear
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.adapter_files import write_adapter

_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def adapter_arguments(model: PreTrainedModel, rank: int) -> dict[str, Any]:
    """Return the engine arguments for one adapter at a time.

    Args:
        model: the engine's model in transformers; may be on the meta device.
        rank: rank of the adapters, at most the last of `ADAPTER_RANKS`.
    """
    assert rank <= ADAPTER_RANKS[-1], "the configuration's rules refuse it"
    reserved = next(known for known in ADAPTER_RANKS if known >= rank)
    # No other layers, such as vLLM's experts: on CPUs, `shared_weights` runs those with kernels that don't support
    # adapters.
    layers = sorted({name.rpartition(".")[2] for name in _linear_layers(model)})
    sizes = {"max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": reserved}
    return {"enable_lora": True, "lora_target_modules": layers} | sizes


class RuntimeAdapters:
    """Collects the matrices of an update, and gives them to vLLM as an adapter in peft's format.

    Attributes:
        in_use: vLLM's request for the adapter of the last update; None before the first.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Start without an adapter.

        Args:
            model: the engine's model in transformers; may be on the meta device.
        """
        self.in_use: Any = None
        self._updates = 0
        self._linear = _linear_layers(model)
        self._layers: list[str] = []
        self._rank = 0
        self._matrices: dict[str, Tensor] = {}

    def open(self, layout: WeightLayout) -> None:
        """Set the matrices that every update has to contain, and drop those that have arrived.

        Raises:
            EngineError: a name or a shape fits no linear layer of the model, or a layer has only one matrix.
        """
        shapes = layout.shapes
        layers = [name.removeprefix(_PREFIX).removesuffix(_DOWN) for name in shapes if name.endswith(_DOWN)]
        rank = shapes[f"{_PREFIX}{layers[0]}{_DOWN}"][0] if layers else 0
        expected = {
            f"{_PREFIX}{layer}{suffix}": shape
            for layer in layers
            if (linear := self._linear.get(layer)) is not None
            for suffix, shape in ((_DOWN, (rank, linear.in_features)), (_UP, (linear.out_features, rank)))
        }
        if not layers or dict(shapes) != expected:
            wrong = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
            raise EngineError(f"adapters do not fit the model's linear layers: {wrong[:3] or 'there are none'}")
        self._layers, self._rank, self._matrices = layers, rank, {}

    def add(self, matrices: Mapping[str, Tensor]) -> None:
        """Keep copies of matrices that arrived."""
        self._matrices |= {name: matrix.clone() for name, matrix in matrices.items()}

    async def load(self, front_end: Any) -> None:
        """Have vLLM load the adapter that arrived, under a new id, and remove the previous one.

        Args:
            front_end: a `vllm.v1.engine.async_llm.AsyncLLM`.

        Raises:
            EngineError: matrices are missing, the files were damaged, or vLLM refused the adapter.
        """
        with self._written() as (folder, digest):
            from rlpack.rollout.vllm import library

            await front_end.collective_rpc("check_adapter", args=(folder, digest))

            self._updates += 1
            name = f"update {self._updates}"
            adapter = library.LoRARequest(lora_name=name, lora_int_id=self._updates, lora_path=folder)
            if not await front_end.add_lora(adapter):
                raise EngineError(f"vLLM did not load the adapter of {name}")
        old, self.in_use = self.in_use, adapter
        if old is not None:
            await front_end.remove_lora(old.lora_int_id)

    @contextmanager
    def _written(self) -> Iterator[tuple[str, str]]:
        """Yield a folder with the adapter, which vLLM must read before the context ends, and the digest of its files.

        The end of the context starts the next update.
        """
        if len(self._matrices) != 2 * len(self._layers):
            raise EngineError(
                f"{len(self._matrices)} of {2 * len(self._layers)} matrices of adapters arrived before the update was "
                "to end"
            )
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._rank,
            "lora_alpha": self._rank,  # a scale of 1: B is already scaled
            "target_modules": sorted({layer.rpartition(".")[2] for layer in self._layers}),
            "bias": "none",
        }
        with tempfile.TemporaryDirectory(prefix="rlpack-adapter-") as folder:
            yield folder, write_adapter(Path(folder), settings, self._matrices)
        self._matrices = {}


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers that can have adapters, by name: all linear layers except the output layer."""
    head = model.get_output_embeddings()
    named = model.named_modules()
    linear = ((name, module) for name, module in named if isinstance(module, nn.Linear) and is_linear(module))
    return {name: module for name, module in linear if module is not head}

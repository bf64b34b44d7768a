"""A weight-transfer backend of vLLM that reads buckets from memory that a rank shares.

vLLM's own backends need CUDA. This one works on every device: vLLM's process maps the memory that a rank writes, on
the CPU (`weight_buffers`) or by CUDA IPC on the GPU that both use (`device_buffers`), and loads the weights as a
checkpoint's, layer by layer, or directly (`direct_load`). vLLM imports this module in each process that holds the model
or a part of it, where `worker_extension_cls` names `RegistersBackend`. Importing it registers the backend, ties vLLM's
processes to their rank (`end_with_rank`), and changes vLLM's choice of kernels for experts.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # pyright: ignore[reportMissingImports]
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
    get_layerwise_info,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.adapter_files import check_adapter
from rlpack.rollout.vllm.device_buffers import DeviceReader
from rlpack.rollout.vllm.direct_load import DirectLoader, LoadRecorder, NoPlanError
from rlpack.rollout.vllm.end_with_rank import end_with_rank
from rlpack.rollout.vllm.shared_names import BACKEND
from rlpack.rollout.vllm.weight_buffers import BucketNote, BucketReader


@dataclass
class SharedInit(WeightTransferInitInfo):
    """The backend's initialization, sent once.

    Attributes:
        trial: the fields of the note of a trial bucket on the GPU, which has to be readable; {} for none.
    """

    trial: dict[str, Any] = field(default_factory=dict)


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """One bucket, or the end of an update.

    Attributes:
        note: the fields of a bucket's `BucketNote`.
        count: the number of buckets of an update, at its end; else 0.
    """

    note: dict[str, Any] = field(default_factory=dict)
    count: int = 0


class SharedMemoryEngine(WeightTransferEngine[SharedInit, SharedUpdate]):
    """Loads buckets: the first update with vLLM's loader, later ones directly if there is a plan."""

    init_info_cls = SharedInit
    update_info_cls = SharedUpdate
    _is_open = False
    _direct: DirectLoader | None = None
    _recorder: LoadRecorder | None = None
    # Why updates are not loaded directly; "" if they are.
    reason = "no update has been loaded"
    # Why the trial bucket can't be read; "" if it can.
    trial_failure = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the readers, which open buffers when buckets name them; the arguments are vLLM's."""
        super().__init__(*args, **kwargs)
        self._reader, self._device_reader = BucketReader(), DeviceReader(self.device)

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Read the trial bucket, if there is one, and keep the reason if it can't be read.

        Nothing is raised: of several workers, vLLM reads the answers up to the first error, and takes the others for
        answers to its next call.
        """
        self.trial_failure = ""
        if init_info.trial:
            try:
                self._read(BucketNote(**init_info.trial), 0)
            except Exception as error:  # noqa: BLE001 - CUDA's errors have many types
                self.trial_failure = f"{type(error).__name__}: {error}"
            finally:
                self._device_reader.end_update()

    def start_weight_update(self) -> None:
        """Begin an update; unless it is loaded directly, vLLM restores the layout that its loaders expect."""
        self._next_index = 0
        self._device_reader.end_update()  # the last update may have failed
        if self._direct is not None:
            self._direct.begin()
            return
        if self._is_open:  # the last update failed; vLLM would count what had arrived towards this one
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_open = True
        if self.device.type == "cpu":
            _pack_experts_again(self.model)
        initialize_layerwise_reload(self.model)
        self._recorder = LoadRecorder(self.model) if self.device.type == "cpu" else None

    def receive_weights(self, update_info: SharedUpdate) -> None:
        """Load one bucket, or check that all have arrived; vLLM ends the update if this raises.

        Raises:
            EngineError: the bucket is not the next one or was corrupted in transit; or a bucket or a weight is missing.
        """
        if update_info.count:
            if update_info.count != self._next_index:
                raise EngineError(f"{self._next_index} of {update_info.count} buckets of weights have arrived")
            if self._direct is not None:
                self._direct.check_complete()
            return
        weights = self._read(BucketNote(**update_info.note), self._next_index)
        if self._direct is not None:
            self._load_directly(self._direct, weights)
        else:
            with nullcontext() if self._recorder is None else self._recorder.watch(weights):
                self.model.load_weights(weights.items())
            for tensor in _copies_of_unused(self.model, weights):
                if self._recorder is not None:
                    self._recorder.keep(tensor)
        self._next_index += 1

    def finish_weight_update(self) -> None:
        """Pack the weights for vLLM's kernels, even if the update is incomplete and about to be dropped."""
        if self._direct is not None:
            self._direct.finish()
            return
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_open = False
        self._device_reader.end_update()
        if self._recorder is None:
            self.reason = "weights are loaded directly on CPUs only"
            return
        try:
            # An incomplete update gives no plan, because some parameter got no weight.
            self._direct = DirectLoader(self.model, self._recorder, self.model_config.dtype)
            self.reason = ""
        except NoPlanError as reason:
            self.reason = str(reason)
        self._recorder = None

    def shutdown(self) -> None:
        """Close the buffers on the GPU; the kernel frees others once both processes have ended."""
        self._device_reader.end_update()

    def _read(self, note: BucketNote, index: int) -> dict[str, Tensor]:
        """Check a bucket and return views of its tensors.

        Raises:
            EngineError: see `BucketReader.read` and `DeviceReader.read`.
        """
        if not note.handles:
            return self._reader.read(note, index)
        if self.device.type != "cuda":
            raise EngineError(f"bucket {note.index} of the weights is on a GPU, but the engine runs on {self.device}")
        return self._device_reader.read(note, index)

    def _load_directly(self, loader: DirectLoader, weights: Mapping[str, Tensor]) -> None:
        """Load one bucket; if it doesn't fit the plan, drop the plan, so that vLLM loads the next update."""
        try:
            loader.load(weights)
        except Exception as error:
            self._direct, self.reason = None, str(error)
            raise


def _copies_of_unused(model: nn.Module, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Copy and return the weights that vLLM holds until their layer is complete; their buffer will be overwritten."""
    copies = []
    storages = {weight.untyped_storage().data_ptr() for weight in weights.values() if weight.numel()}
    for module in model.modules():
        for _, call in get_layerwise_info(module).loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in storages:
                    copies.append(value.clone())
                    call.arguments[name] = copies[-1]
    return copies


def _pack_experts_again(model: nn.Module) -> None:
    """Have vLLM pack the weights of experts for its CPU kernels as they arrive.

    vLLM packs them when it makes the layer's kernel, and leaves updates unpacked, which the kernel would read in the
    wrong order. Forgetting the kernel makes vLLM make and pack again.
    """
    for module in model.modules():
        if isinstance(module, UnquantizedFusedMoEMethod):
            module.moe_kernel = None  # pyright: ignore[reportArgumentType]


def _choose_kernels_of_experts_without_adapters() -> None:
    """Have vLLM on CPUs run experts by the same kernels with adapters as without.

    Where adapters are enabled, vLLM chooses Triton's kernels, which no CPU can run, for the case that experts have
    adapters. Here they have none: vLLM may adapt linear layers alone (`runtime_adapters.adapter_arguments`).
    """
    create = UnquantizedFusedMoEMethod.__init__

    def create_without_adapters(self: Any, moe: Any, *args: Any, **kwargs: Any) -> None:
        moe.is_lora_enabled = False
        create(self, moe, *args, **kwargs)

    if current_platform.is_cpu():
        UnquantizedFusedMoEMethod.__init__ = create_without_adapters


end_with_rank()
_choose_kernels_of_experts_without_adapters()
WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


class RegistersBackend:
    """A base class of vLLM's worker; naming it as the worker's extension imports this module."""

    weight_transfer_engine: Any

    def why_not_direct(self) -> str:
        """Return why updates of weights are not loaded directly, "" if they are."""
        return self.weight_transfer_engine.reason

    def why_trial_failed(self) -> str:
        """Return why the trial bucket can't be read, "" if it can."""
        return self.weight_transfer_engine.trial_failure

    def check_adapter(self, folder: str, digest: str) -> None:
        """Raise unless the files of an adapter are as the rank made them, before vLLM reads them.

        Raises:
            EngineError: see `adapter_files.check_adapter`.
        """
        check_adapter(Path(folder), digest)

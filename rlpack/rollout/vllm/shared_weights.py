"""A weight-transfer backend of vLLM that reads buckets from shared memory.

vLLM's own backends need CUDA. This one works on every device: vLLM's process maps the file that a rank wrote, and loads
the weights as a checkpoint's, layer by layer. vLLM imports this module in its own process, where `worker_extension_cls`
names `RegistersBackend`; importing it registers the backend, and ends the process with its rank.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import nn
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

from rlpack.rollout.vllm.shared_names import BACKEND
from rlpack.rollout.vllm.weight_files import BucketNote, mapped

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass
class SharedInit(WeightTransferInitInfo):
    """What the backend learns once: nothing."""


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """One bucket.

    Attributes:
        note: the fields of its `BucketNote`.
    """

    note: dict[str, Any] = field(default_factory=dict)


class SharedMemoryEngine(WeightTransferEngine[SharedInit, SharedUpdate]):
    """Loads buckets from files of shared memory."""

    init_info_cls = SharedInit
    update_info_cls = SharedUpdate
    _is_open = False

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Do nothing: files need no connection."""

    def start_weight_update(self) -> None:
        """Begin an update: vLLM unpacks what it packed for its kernels."""
        if self._is_open:  # the last update failed; vLLM would count what had come of it to this one
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_open, self._next_index = True, 0
        if self.device.type == "cpu":
            _pack_experts_again(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedUpdate) -> None:
        """Load one bucket.

        Raises:
            EngineError: the bucket is not the next one, or was changed on its way.
        """
        weights = mapped(BucketNote(**update_info.note), self._next_index)
        self.model.load_weights(weights.items())
        self._next_index += 1

    def finish_weight_update(self) -> None:
        """Make the kernels' copies of the weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_open = False

    def shutdown(self) -> None:
        """Do nothing: no file outlives its bucket."""


def _pack_experts_again(model: nn.Module) -> None:
    """Have vLLM pack the weights of experts for its CPU kernels as they arrive.

    vLLM packs them when it makes the layer's kernel, and leaves updates unpacked, which the kernel would read in the
    wrong order. Forgetting the kernel makes vLLM make and pack again.
    """
    for module in model.modules():
        if isinstance(module, UnquantizedFusedMoEMethod):
            module.moe_kernel = None  # pyright: ignore[reportArgumentType]


def _end_with_the_rank() -> None:
    """Have the kernel end this process with the process that started it, which nothing else does if that is killed."""
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent.pid:  # it has ended already
        os._exit(1)


_end_with_the_rank()
WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


class RegistersBackend:
    """Adds nothing to vLLM's worker; naming it as the worker's extension imports this module."""

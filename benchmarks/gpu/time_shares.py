"""What a GPU does during a call, by kind of kernel."""

import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Parts of kernels' names, in order: the first kind with a part in a name counts.
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "log-probs": ("_sum_up", "_to_gradients"),
    "NCCL": ("nccl",),
    "kernels over many tensors": ("multi_tensor",),  # the optimizer, clipping, FSDP2's copies
    "matrix products": ("gemm", "nvjet", "xmma", "cutlass", "cublas", "splitk"),
    "copies": ("memcpy", "memset", "copy", "catarray"),
    "reductions": ("reduce",),
    "other kernels": ("",),
}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name.

    >>> kind_of("void pytorch_flash::flash_fwd_kernel<...>"), kind_of("nvjet_tst_256x128"), kind_of("vectorized")
    ('attention', 'matrix products', 'other kernels')
    """
    return next(kind for kind, parts in KINDS.items() if any(part in kernel.lower() for part in parts))


def time_shares(run: Callable[[], object]) -> dict[str, float]:
    """Return the shares of a call's time by kind of kernel.

    Kernels that run at the same time count twice. What is left is `idle`, which includes the profiler's delays.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    spent = defaultdict[str, float](float)
    for event in profiled.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.device_type() == DeviceType.CUDA:
            spent[kind_of(event.name())] += event.duration_ns() / 1e9  # pyright: ignore[reportAttributeAccessIssue]
    shares = {kind: spent[kind] / seconds for kind in KINDS if spent[kind]}
    return shares | {"idle": max(0.0, 1 - sum(shares.values()))}

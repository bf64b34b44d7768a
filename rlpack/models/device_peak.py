"""The rate at which a rank's device multiplies matrices: from a table of GPUs, or measured.

It is the denominator of a model's FLOP utilization (MFU).
"""

import functools
import math
import re
import time
from typing import Literal

import torch

from rlpack.models.cpu_products import matmul_transposed

# Dense peaks in TFLOP/s by words of the device's name: bf16 with fp32 sums, and fp32 without TF32, PyTorch's default.
# The first match counts. From the vendors' data sheets (NVIDIA's state bf16 with sparsity, twice the dense rate, from
# Ampere on) at the boost clock; torchtitan's table (torchtitan/tools/utils.py) has the same bf16 numbers.
PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("GH200", 989.4, 66.9),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.4, 66.9),
    ("H100 NVL", 835.5, 60.0),
    ("H100 PCIe", 756.0, 51.2),
    ("H100", 989.4, 66.9),
    ("H800", 989.4, 66.9),
    ("H20", 148.0, 44.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A10G", 70.0, 31.5),
    ("A10", 125.0, 31.2),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("RTX 6000 Ada", 364.2, 91.1),
    ("RTX A6000", 154.8, 38.7),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.2, 35.6),
    ("MI300X", 1307.4, 163.4),
)
# Names of parts of a GPU, and of models that are slower than the ones they are named after.
_SMALLER = re.compile(r"\b(MIG|Laptop|Max-Q|D)\b")
# Time limit of a measurement, after one product to warm up.
_MEASURE_S = 0.2
_MEASURED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Size of the square matrices, similar to the layers of small models.
_SIDE = 1024

Dtype = Literal["fp32", "bf16"]


def listed_peak(name: str, dtype: Dtype) -> float | None:
    """Return the FLOP/s of a GPU by its name; None if the table lacks it, or for a part of a GPU.

    >>> listed_peak("NVIDIA A100-SXM4-80GB", "bf16"), listed_peak("NVIDIA A100-SXM4-80GB", "fp32")
    (312000000000000.0, 19500000000000.0)
    """
    if _SMALLER.search(name):
        return None
    for words, bf16, fp32 in PEAKS:
        if re.search(rf"\b{words}\b", name):
            return 1e12 * (bf16 if dtype == "bf16" else fp32)
    return None


@functools.cache
def device_peak(device: str, dtype: Dtype) -> float:
    """Return the FLOP/s of a device, listed or measured; measured once per process, in about a quarter of a second.

    Args:
        device: `cpu` or `cuda`.
        dtype: dtype of the matrices.
    """
    listed = listed_peak(torch.cuda.get_device_name(), dtype) if device == "cuda" else None
    return measured_rate(device, dtype) if listed is None else listed


def measured_rate(device: str, dtype: Dtype) -> float:
    """Return the FLOP/s of the fastest product of two square matrices within the time limit, on this process's threads.

    On a CPU these are PyTorch's products and those of `rlpack.models.cpu_products`.
    """
    side = _SIDE if device == "cpu" else 8 * _SIDE
    left, right = (torch.ones(side, side, device=device, dtype=_MEASURED_DTYPES[dtype]) for _ in range(2))
    products = (torch.matmul, matmul_transposed) if device == "cpu" else (torch.matmul,)
    fastest = math.inf
    with torch.no_grad():
        for product in products:
            product(left, right)
            began = time.perf_counter()
            while fastest == math.inf or time.perf_counter() - began < _MEASURE_S / len(products):
                start = time.perf_counter()
                product(left, right)
                if device == "cuda":
                    torch.cuda.synchronize()
                fastest = min(fastest, time.perf_counter() - start)
    return 2.0 * side**3 / fastest

"""Architectures whose outputs and gradients equal transformers' own, as compared by `benchmarks.families`.

`verified.json` lists them for one version of transformers, which it names. For other versions nothing is known: models
change, and small ones are compared again before a run starts.
"""

import functools
import json
from importlib.metadata import version
from importlib.resources import files
from typing import Any


def is_verified(model_type: str, *, packed: bool) -> bool:
    """Return whether policies and critics of an architecture are known to be correct in a layout, in fp32 and bf16.

    False under any version of transformers other than the one that was compared.

    >>> is_verified("qwen2", packed=True), is_verified("mamba", packed=True), is_verified("mamba", packed=False)
    (True, False, True)
    """
    verified = _verified()
    if version("transformers") != verified["transformers"]:
        return False
    return model_type in verified["packed" if packed else "padded"]


@functools.cache
def _verified() -> dict[str, Any]:
    """Return the versions of transformers and PyTorch, and the architectures by layout."""
    return json.loads((files("rlpack.models") / "verified.json").read_text(encoding="utf-8"))

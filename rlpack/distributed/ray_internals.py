"""The private names of Ray that rlpack uses, each with a fallback for versions of Ray that lack it.

Private names come and go between Ray's versions. Names are looked up when they are used, so a missing one affects at
most the feature that needs it. The only other private names are in `rlpack.distributed.jobs.upload`.
"""

import importlib
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import ray

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
# Ray puts a store of at most this many bytes on disk if shared memory is too small.
_LARGEST_SLOW_STORE = 10_000_000_000
_NEVER_UPLOADED = (".git", ".venv", "venv", "__pycache__")
_STORE = "object_store_memory"


def find(module: str, name: str) -> Any:
    """Return `ray.<module>.<name>`, None if this version of Ray does not have it."""
    try:
        return getattr(importlib.import_module(f"ray.{module}"), name)
    except (ImportError, AttributeError):
        logger.debug("Ray %s has no %s.%s", ray.__version__, module, name)
        return None


def private_module(name: str) -> ModuleType:
    """Return `ray._private.<name>`; an empty module if this version of Ray does not have it."""
    try:
        return importlib.import_module(f"ray._private.{name}")
    except ImportError:
        return ModuleType(name)


def temp_dir() -> Path:
    """Return the folder of Ray's files and logs."""
    found = find("_common.utils", "get_default_ray_temp_dir") or find("_common.utils", "get_ray_temp_dir")
    if found is not None:
        return Path(found())
    default = "/tmp" if sys.platform == "darwin" else os.environ.get("TMPDIR", "/tmp")
    return Path(os.environ.get("RAY_TMPDIR", default if os.name == "posix" else tempfile.gettempdir())) / "ray"


def logs_folder() -> str:
    """Return the folder of Ray's logs on this machine, while connected."""
    node = find("_private.worker", "_global_node")
    return str(temp_dir() / "session_latest" / "logs") if node is None else node.get_logs_dir_path()


def read_token_again() -> None:
    """Make Ray read its authentication mode and token from the environment again, if it has cached them."""
    config, loader = find("_raylet", "Config"), find("_raylet", "AuthenticationTokenLoader")
    try:
        config.initialize("")
        loader.instance().reset_cache()
    except AttributeError:
        logger.warning("Ray %s can't reload its token; this run's Ray cluster may be unprotected", ray.__version__)


def forbid_implicit_start() -> None:
    """Let no function of Ray start a Ray or join one by itself; `ray.init` still does."""
    vars(private_module("auto_init_hook"))["enable_auto_connect"] = False


def available_memory() -> float:
    """Return the bytes of memory that are free, within the limit of a container."""
    estimate = find("_private.utils", "estimate_available_memory")
    return psutil.virtual_memory().available if estimate is None else estimate()


def shared_memory() -> float:
    """Return the bytes of shared memory that are free."""
    read = find("_private.utils", "get_shared_memory_bytes")
    if read is not None:
        return read()
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.exists() else float("inf")


def largest_slow_store() -> float:
    """Return the largest store, in bytes, that Ray puts on disk where shared memory is too small."""
    return find("_private.ray_constants", "REQUIRE_SHM_SIZE_THRESHOLD") or _LARGEST_SLOW_STORE


def children_end_with_parent() -> bool:
    """Return whether the kernel ends Ray's processes with the one that started them."""
    detect = find("_private.utils", "detect_fate_sharing_support")
    return sys.platform == "linux" if detect is None else detect()


def upload_excludes() -> list[str]:
    """Return the patterns of files that Ray never uploads."""
    default = find("_private.ray_constants", "get_runtime_env_default_excludes")
    return list(_NEVER_UPLOADED) if default is None else default()


def stores() -> dict[str, tuple[float, float]]:
    """Return the free and the total bytes of each node's object store; Ray's GCS answers.

    Without the private names, all bytes count as free.
    """
    free_of, total_of = (find("_private.state", f"{kind}_resources_per_node") for kind in ("available", "total"))
    if total_of is None:
        total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    else:
        total = total_of()
    free = total if free_of is None else free_of()
    return {node: (free.get(node, {}).get(_STORE, 0.0), has.get(_STORE, 0.0)) for node, has in total.items()}

"""A Ray that lacks a private name, as older and newer versions do, gives the same answers by other means."""

import ast
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RaySystemError

from rlpack.distributed import local_ray, ray_internals
from rlpack.distributed.run_token import RunToken

ROOT = Path(__file__).parents[3]
NAMES = {
    "temp_dir": ["_common.utils.get_default_ray_temp_dir", "_common.utils.get_ray_temp_dir"],
    "children_end_with_parent": ["_private.utils.detect_fate_sharing_support"],
    "largest_slow_store": ["_private.ray_constants.REQUIRE_SHM_SIZE_THRESHOLD"],
    "upload_excludes": ["_private.ray_constants.get_runtime_env_default_excludes"],
}


def remove(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    monkeypatch.delattr(importlib.import_module(f"ray.{module}"), attribute, raising=False)


@pytest.mark.parametrize("function", NAMES)
def test_an_answer_is_the_same_without_rays_private_names(monkeypatch, function):
    monkeypatch.setenv("RAY_TMPDIR", "/somewhere")
    expected = getattr(ray_internals, function)()
    for name in NAMES[function]:
        remove(monkeypatch, name)
    assert getattr(ray_internals, function)() == expected


def test_free_memory_is_known_without_ray(monkeypatch):
    remove(monkeypatch, "_private.utils.estimate_available_memory")
    assert 1e6 < ray_internals.available_memory() < 1e15


def test_free_shared_memory_is_known_without_ray(monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((4096, 4096, 1000, 300, 200, 0, 0, 0, 0, 255)))
    monkeypatch.setattr(os, "statvfs", os.fstatvfs)
    assert ray_internals.shared_memory() == 200 * 4096  # what Ray says
    remove(monkeypatch, "_private.utils.get_shared_memory_bytes")
    assert ray_internals.shared_memory() == 200 * 4096


def test_no_call_of_ray_starts_one_once_that_is_forbidden(monkeypatch):
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    started: list[bool] = []
    monkeypatch.setattr(ray, "init", lambda: started.append(True))
    ray_internals.forbid_implicit_start()
    with pytest.raises(RaySystemError, match="Ray has not been started yet"):
        ray.get([], timeout=0)
    assert not started


def test_a_ray_without_tokens_leaves_the_environment_as_it_was(monkeypatch):
    remove(monkeypatch, "_raylet.AuthenticationTokenLoader")
    before = dict(os.environ)
    token = RunToken()
    with token.in_environment():
        assert os.environ["RAY_AUTH_MODE"] == "token"
    token.remove()
    assert dict(os.environ) == before


def test_stores_are_known_from_the_nodes_alone(monkeypatch):
    for kind in ("available", "total"):
        remove(monkeypatch, f"_private.state.{kind}_resources_per_node")
    nodes: list[dict[str, Any]] = [
        {"NodeID": "a", "Alive": True, "Resources": {"object_store_memory": 5.0, "CPU": 2.0}},
        {"NodeID": "b", "Alive": False, "Resources": {}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert ray_internals.stores() == {"a": (5.0, 5.0)}


def test_a_local_start_needs_none_of_the_names_that_it_replaces(monkeypatch):
    for name in ("services.start_ray_process", "services.get_node", "node.wait_for_persisted_port", "node.Node"):
        remove(monkeypatch, f"_private.{name}")

    class Daemons:
        starting = staticmethod(lambda popen: popen)

    for module, name, replace in local_ray._replacements([], Daemons(), 1, 1.0, 1.0):  # pyright: ignore[reportArgumentType]
        with local_ray._replaced(module, name, replace):
            pass


def test_only_uploads_import_private_names_of_ray():
    def imported(path: Path) -> set[str]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        froms = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        return froms | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}

    folder = ROOT / "rlpack" / "distributed"
    found = {path.name for path in folder.rglob("*.py") if any(name.startswith("ray._") for name in imported(path))}
    assert found == {"upload.py"}

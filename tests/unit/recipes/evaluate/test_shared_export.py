"""Whether an evaluation's ranks see the export of a checkpoint; a node is a folder under which they look for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from rlpack.config.recipes import EVALUATE_TARGET, config_class
from rlpack.config.schema import Config
from rlpack.distributed import shared_folder
from rlpack.distributed.errors import PlacementError
from rlpack.recipes.evaluate.shared_export import check_export_is_shared
from tests.unit.distributed.test_shared_folder import Ranks


class Pools:
    """Stands in for a cluster whose pools have a rank on a node that does not share the driver's disk."""

    def __init__(self, root: Path) -> None:
        self.opened: list[list[str]] = []
        self._ranks = Ranks(["far"], root)

    def open_pools(self, names: list[str]) -> dict[str, Ranks]:
        self.opened.append(names)
        return dict.fromkeys(names, self._ranks)


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pools:
    """Return pools on the disk `b`; the driver writes to `a`."""
    for disk in ("a", "b"):
        (tmp_path / disk).mkdir()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    monkeypatch.setattr(shared_folder, "_WAIT_S", 0.3)
    return Pools(tmp_path)


def evaluation_of(folder: Path, checkpoint: str | None) -> Config:
    kind = config_class(EVALUATE_TARGET)
    placement = {"roles": {"reward": "scores"}}
    values = {"model": {"path": str(folder)}, "evaluate": {"checkpoint": checkpoint}, "placement": placement}
    return kind.model_validate(values)


def test_a_node_that_does_not_see_the_export_is_refused_with_the_key_to_set(pools: Pools, tmp_path: Path):
    config = evaluation_of(tmp_path / "a", "runs/mine/checkpoints/train/step-3")
    with pytest.raises(PlacementError) as refused:
        check_export_is_shared(cast(Any, pools), config, ["rollout", "reward"])
    assert str(refused.value) == (
        "node 10.0.0.2 does not share evaluate.output_dir with the driver: ranks of pool main there don't see a file "
        f"that the driver wrote in {tmp_path / 'a'}, so they can't load the exported checkpoint; set "
        "evaluate.output_dir to a folder on storage that all nodes mount at the same path"
    )
    assert pools.opened == [["main", "scores"]]


def test_a_model_that_was_not_exported_may_be_on_each_node(pools: Pools, tmp_path: Path):
    check_export_is_shared(cast(Any, pools), evaluation_of(tmp_path / "a", None), ["rollout", "reward"])
    assert pools.opened == []

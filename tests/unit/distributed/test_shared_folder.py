"""Whether ranks on other nodes see the run's directory; a node is a folder under which the ranks look for it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from rlpack.distributed import shared_folder
from rlpack.distributed.calls import Pending
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.shared_folder import check_shared, warn_of_lost_records

PLACES = {"here": "a", "far": "b", "mounted": "a"}


class Ranks:
    def __init__(self, nodes: list[str], root: Path) -> None:
        self.nodes, self._root = nodes, root
        self.asked = 0

    def apply(self, function: Callable[..., Any], marker: Path, token: str) -> Pending[list[Any]]:
        self.asked += 1
        paths = [self._root / PLACES[node] / marker.name for node in self.nodes]
        return Pending(lambda: [function(path, token) for path in paths])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the disks `a`, the driver's, and `b`."""
    for disk in ("a", "b"):
        (tmp_path / disk).mkdir()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    monkeypatch.setattr(shared_folder, "_WAIT_S", 0.3)
    return tmp_path


@pytest.mark.parametrize(("nodes", "asked"), [(["here", "here"], 0), (["here", "mounted"], 1)])
def test_ranks_that_see_the_folder_pass_and_nothing_is_left_in_it(root: Path, nodes: list[str], asked: int):
    ranks = Ranks(nodes, root)
    check_shared("main", cast(Any, ranks), root / "a")
    assert (ranks.asked, list((root / "a").iterdir())) == (asked, [])


def test_a_node_with_a_folder_of_the_same_name_is_named(root: Path):
    with pytest.raises(PlacementError) as refused:
        check_shared("main", cast(Any, Ranks(["here", "far", "far"], root)), root / "a")
    assert str(refused.value) == (
        "node 10.0.0.2 does not share run_dir with the driver: ranks of pool main there don't see a file that the "
        f"driver wrote in {root / 'a'}, so the run's checkpoints would be incomplete; set run_dir to a "
        "folder on storage that all nodes mount at the same path"
    )
    assert not list((root / "a").iterdir())


def test_the_error_of_another_folder_names_its_key_and_the_effect(root: Path):
    with pytest.raises(PlacementError) as refused:
        check_shared("main", cast(Any, Ranks(["far"], root)), root / "a", key="evaluate.output_dir", effect="it fails")
    assert str(refused.value) == (
        "node 10.0.0.2 does not share evaluate.output_dir with the driver: ranks of pool main there don't see a file "
        f"that the driver wrote in {root / 'a'}, so it fails; set evaluate.output_dir to a folder on storage that all "
        "nodes mount at the same path"
    )


def test_pools_whose_logs_and_spans_are_lost_are_one_warning(root: Path, caplog: pytest.LogCaptureFixture):
    nodes = {"main": ["here", "here"], "scores": ["mounted"], "engines": ["here", "far"], "judges": ["far"]}
    pools = {name: Ranks(places, root) for name, places in nodes.items()}
    warn_of_lost_records(cast(Any, pools), root / "a")
    assert [record.getMessage() for record in caplog.records] == [
        f"node 10.0.0.2 does not share the run's directory {root / 'a'} with the driver: the logs and spans of the "
        "ranks of pools engines, judges there are lost, so no report, trace or forecast has them; use a folder on "
        "storage that all nodes mount at the same path"
    ]
    assert [ranks.asked for ranks in pools.values()] == [0, 1, 1, 1]
    assert not list((root / "a").iterdir())


def test_nothing_is_lost_where_the_folder_is_shared(root: Path, caplog: pytest.LogCaptureFixture):
    warn_of_lost_records({}, root / "a")
    warn_of_lost_records(cast(Any, {"engines": Ranks(["here", "mounted"], root)}), root / "a")
    assert not caplog.records


def test_a_file_with_other_content_is_not_the_drivers(root: Path):
    marker = root / "b" / "marker"
    marker.write_text("of an earlier run")
    assert shared_folder._node_without(marker, "token") == "10.0.0.2"
    marker.write_text("token")
    assert shared_folder._node_without(marker, "token") is None

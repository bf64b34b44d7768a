"""Models of files whose experts or layers ranks divide are compared with the undivided model as ranks start."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlpack.config.schema import Actor, Model
from rlpack.config.sections.parallelism import Parallel
from rlpack.distributed.layout import ParallelLayout
from rlpack.models import check_split
from rlpack.models.errors import ModelError
from rlpack.models.expert_parallel import expert_modules
from rlpack.models.packed import PackedModel, language_model
from rlpack.worker import RankContext
from rlpack.workers import build
from tests.builders import tiny_config, tiny_tokenizer
from tests.distributed.layouts.cases import FAMILIES
from tests.distributed.models.test_sharded_loading import save
from tests.distributed.processes import on_ranks

SIZES: dict[str, dict[str, Any]] = {"ep": {"ep": 2}, "pp": {"pp": 2}}


def test_the_families_that_are_not_compared_are_those_of_the_table_of_layouts():
    assert {family["model_type"] for family in FAMILIES.values()} == check_split.TESTED_FAMILIES


def scaled(module: nn.Module, arguments: Any, outputs: Tensor) -> Tensor:
    return 1.01 * outputs


def divided_wrong(model: PackedModel, *arguments: Any) -> PackedModel:
    """Divide a model as ranks do, and scale what comes from other ranks, in packed and single rows alike."""
    build_divided(model, *arguments)
    if model.expert_split is not None:
        modules = [module for _, module in expert_modules(model)]
    else:
        modules = [language_model(model.model).get_submodule("embed_tokens")]
    for module in modules:
        module.register_forward_hook(scaled)
    return model


build_divided = build.divide_weights


def start(mesh: DeviceMesh, rank: int, folder: Path, sizes: dict[str, Any]) -> list[str]:
    """Return the errors of starts with all checks, "" for none: divided right, wrong, and wrong without the check."""
    actor = Actor(isolation_check=True, parallel=Parallel(**sizes))
    config = tiny_config(model=Model(path=str(folder)), actor=actor)
    layout = ParallelLayout(**({"dp_shard": 2} | sizes if "ep" in sizes else sizes))
    tested, errors = check_split.TESTED_FAMILIES, []
    for divide, families in (
        (build_divided, tested),
        (divided_wrong, tested),
        (divided_wrong, tested | {folder.name}),
    ):
        with patch.object(build, "TESTED_FAMILIES", families), patch.object(build, "divide_weights", divide):
            try:
                build.build_policy(config, "actor", tiny_tokenizer(), RankContext("main", rank, layout))
                errors.append("")
            except ModelError as error:
                errors.append(str(error))
    return errors


@pytest.mark.parametrize(("dimension", "family"), [("ep", "qwen2_moe"), ("pp", "phi3")])
def test_a_division_that_changes_outputs_is_refused_though_rows_agree(tmp_path: Path, dimension: str, family: str):
    folder = save(tmp_path, family, vocab_size=len(tiny_tokenizer()))
    for right, wrong, unseen in on_ranks(tmp_path, 2, start, folder, SIZES[dimension]):
        assert right == ""
        assert "differs by" in wrong
        assert f"if ranks share it (at most 1e-04); set actor.parallel.{dimension}=1" in wrong
        assert unseen == ""  # the other checks compare the divided model with itself

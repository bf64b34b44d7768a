"""Folders that several ranks export are those that one process saves with transformers."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.schema import Model
from rlpack.config.sections.optimization import Lora
from rlpack.models import gather_weights as gathering
from rlpack.models.adapters import add_adapters
from rlpack.models.model_export import export_model
from rlpack.models.open_model import open_causal_lm
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from tests.distributed.models.test_sharded_loading import FAMILIES, save
from tests.distributed.models.test_weight_stream import large_policy
from tests.distributed.processes import on_ranks
from tests.memory_rise import MIB, MemoryRise
from tests.unit.models.test_model_export import assert_same_folder
from tests.unit.models.tiny import tiny_model


def export_families(mesh: DeviceMesh, rank: int, folder: str, replicas: int) -> None:
    """Load each family in parts and export it, in one file and in several; for those in pieces of some rows."""
    ranks = {"rank": rank, "num_ranks": mesh.size()}
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, mesh.size() // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    for family in FAMILIES:
        stored = open_causal_lm(Model(path=f"{folder}/{family}"), attention_name="eager")
        model = PackedModel(stored.model)
        shard_model(model, mesh)
        stored.materialize(model, "cpu")
        export_model(model, Path(folder) / f"{family}-whole", **ranks)
        with patch.object(gathering, "_PIECE_BYTES", 1000):
            export_model(model, Path(folder) / f"{family}-files", file_bytes=9000, **ranks)


@pytest.mark.parametrize(("size", "replicas"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_all_ranks_write_what_one_process_saves(tmp_path: Path, size: int, replicas: int):
    for family in FAMILIES:
        save(tmp_path, family)
    on_ranks(tmp_path, size, export_families, str(tmp_path), replicas)
    for family in FAMILIES:
        truth = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32)
        truth.save_pretrained(tmp_path / f"{family}-expected")
        assert_same_folder(tmp_path / f"{family}-whole", tmp_path / f"{family}-expected")
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"{family}-files", dtype=torch.float32)
        assert len(list((tmp_path / f"{family}-files").glob("*.safetensors"))) > 2
        for name, weight in truth.named_parameters():
            assert torch.equal(weight, reloaded.get_parameter(name)), name


def export_adapters(mesh: DeviceMesh, rank: int, folder: str, piece_bytes: int) -> None:
    model = adapted(Path(folder))
    shard_model(model, mesh)
    with patch.object(gathering, "_PIECE_BYTES", piece_bytes):
        export_model(model, Path(folder) / "found", rank=rank, num_ranks=mesh.size())


def adapted(folder: Path) -> PackedModel:
    """Return a model whose adapters have an effect."""
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    add_adapters(model, Lora(rank=2), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=generator)
    return PackedModel(model)


@pytest.mark.parametrize("piece_bytes", [300, 2**24])
def test_adapters_are_merged(tmp_path: Path, piece_bytes: int):
    torch.manual_seed(0)
    save(tmp_path, "llama")
    on_ranks(tmp_path, 2, export_adapters, str(tmp_path), piece_bytes)
    model, row = adapted(tmp_path).model, torch.arange(9)[None]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "found", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    # In float64, where rounding can't hide an error of the merge in fp32.
    logits = [each.double()(row).logits for each in (model, exported, base)]
    distance = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert distance < 1e-5 < (logits[0] - logits[2]).norm() / logits[0].norm()


def failing_export(mesh: DeviceMesh, rank: int, folder: str) -> str:
    model = PackedModel(AutoModelForCausalLM.from_config(family_config("llama"), dtype=torch.float32))
    shard_model(model, mesh)
    try:
        export_model(model, Path(folder), rank=rank, num_ranks=mesh.size(), file_bytes=9000)
    except OSError as error:
        return type(error).__name__
    return "written"


def test_a_rank_that_cannot_write_keeps_no_other_rank_waiting(tmp_path: Path):
    folder = tmp_path / "model"
    assert on_ranks(tmp_path, 2, failing_export, str(folder)) == ["written", "written"]
    second = sorted(path.name for path in folder.glob("*.safetensors"))[1]
    (folder / second).unlink()
    (folder / second).mkdir()
    assert on_ranks(tmp_path, 2, failing_export, str(folder)) == ["written", "IsADirectoryError"]


def test_a_disk_that_is_too_small_for_the_model_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = PackedModel(AutoModelForCausalLM.from_config(family_config("llama"), dtype=torch.float32))
    monkeypatch.setattr(Path, "open", lambda path, mode: open("/dev/full", mode))  # noqa: SIM115
    with pytest.raises(OSError, match=r"doesn't fit into .*/model, where [\d,]+ bytes are free .*; free some space"):
        export_model(model, tmp_path / "model")


def export_memory(mesh: DeviceMesh, rank: int, folder: str, model: str) -> int:
    """Return how far memory rises while a rank takes part in an export."""
    memory = MemoryRise()
    policy = MODELS[model]()
    shard_model(policy, mesh)
    ranks = {"rank": rank, "num_ranks": mesh.size(), "file_bytes": 64 * MIB}
    policy.run(lambda: None)  # sets up communication, which takes memory, too
    export_model(policy, Path(folder), **ranks)
    memory.start()
    export_model(policy, Path(folder), **ranks)
    return memory.num_bytes


def one_large_weight() -> PackedModel:
    """Return a model of 260 MiB, of which the embedding has 256."""
    shape = {"vocab_size": 131_072, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
    return Policy(tiny_model("qwen2", dtype=torch.float32, tie_word_embeddings=True, **shape))


def large_experts() -> PackedModel:
    """Return a model of 400 MiB, of which stacked experts have 256 and 128 MiB."""
    shape = {"hidden_size": 512, "moe_intermediate_size": 1024, "num_experts": 64, "num_hidden_layers": 1}
    return PackedModel(tiny_model("qwen3_moe", dtype=torch.float32, **shape))


MODELS = {"small weights": large_policy, "one large weight": one_large_weight, "experts": large_experts}


@pytest.mark.parametrize("model", MODELS)
def test_memory_of_an_exporting_rank_is_bounded_by_a_few_pieces_of_a_weight(tmp_path: Path, model: str):
    """Of the rank that writes it, too: the pieces of a large weight go straight to the file."""
    for rise in on_ranks(tmp_path, 2, export_memory, str(tmp_path / "model"), model):
        assert rise < 32 * MIB

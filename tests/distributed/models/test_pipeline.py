"""Stages of a pipeline train, move and export the same weights as one rank."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.weight_layout import WeightForm
from rlpack.config.schema import Config, Model
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.models import gather_weights as gathering
from rlpack.models.errors import ModelError
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.inputs import pack_rows
from rlpack.models.model_export import INDEX, export_model
from rlpack.models.open_model import open_causal_lm
from rlpack.models.packed import PackedModel
from rlpack.models.pipeline_parallel import add_tied_gradients, cut_model, meta_copy
from rlpack.models.policy import Policy
from rlpack.models.stage_link import StageLink
from rlpack.models.weight_stream import WeightStream, load_folder
from rlpack.worker import RankContext
from rlpack.workers.actor import ActorWorker
from rlpack.workers.critic import CriticWorker
from rlpack.workers.loss import ValueLoss
from tests.builders import exported_weights, tiny_tokenizer
from tests.distributed.actors import policy_loss
from tests.distributed.layouts import ranks
from tests.distributed.layouts.cases import FAMILIES, LAYOUTS, RUNS_ALL, config_of, in_mode, layout_of
from tests.distributed.layouts.truth import batch_with_values
from tests.distributed.models.test_weight_stream import large_policy
from tests.distributed.processes import on_ranks
from tests.memory_rise import MIB, MemoryRise
from tests.unit.models.tiny import tiny_model
from tests.whole_weights import full_state_dict

CANARY = torch.tensor([[3, 5, 7, 11], [2, 4, 6, 8]])
# Runs that a pipeline repeats; the last is saved in the background. Llama's embedding is tied, so it is on two stages.
RUNS: dict[str, dict[str, Any]] = {
    "clipped": {"optimizer": Optimizer(max_grad_norm=0.05, learning_rate=0.02)},
    "first stage frozen": {"optimizer": Optimizer(freeze=("*layers.0.*", "*embed_tokens*"), learning_rate=0.02)},
    "without decay": {"optimizer": Optimizer(no_decay=("*layers.1.*",), weight_decay=0.5, learning_rate=0.02)},
    "adapters": {"lora": Lora(rank=3), "gradient_checkpointing": "full"},
    "adapters of one stage": {"lora": Lora(rank=3, targets=("*layers.1.*",))},
    "offloaded": {"offload": "optimizer"},
}


# Runs that start with all checks of a model.
CHECKED = ("first stage frozen", "adapters")


def actor_of(
    context: RankContext, layout: str, family: str, name: str, *, checked: bool = False
) -> tuple[ActorWorker, Config]:
    config = in_mode(config_of(family, layout=layout), "packed")
    actor = config.actor.model_copy(update=RUNS[name] | {"isolation_check": checked})
    config = config.model_copy(update={"actor": actor})
    return ActorWorker.from_settings(context, config, tiny_tokenizer()), config


def trained(
    mesh: DeviceMesh, rank: int, layout: str, family: str, batch: BatchedDataDict, folder: Path
) -> dict[str, Any]:
    """Take two steps, save, load, and take another; return metrics, canary, and the weights that this rank exports."""
    context, found = RankContext("main", rank, layout_of(layout)), {}
    for number, name in enumerate(RUNS):
        actor, config = actor_of(context, layout, family, name, checked=name in CHECKED)
        metrics = [ranks._step(actor.train_step, context, config, batch, policy_loss(config)) for _ in range(2)]
        stage = actor._scorer.policy.stage
        assert stage is None or stage.on_the_way() == []
        if name == "offloaded":
            actor.start_save(f"{folder}-{number}", 30.0)
            actor.finish_save(30.0)
        else:
            actor.save(f"{folder}-{number}")
        again, _ = actor_of(context, layout, family, name)
        again.load(f"{folder}-{number}")
        metrics.append(ranks._step(again.train_step, context, config, batch, policy_loss(config)))
        weights = {key: weight.numpy().copy() for key, weight in exported_weights(again).items()}
        if "lora" in RUNS[name]:  # what an engine that applies adapters gets
            stream = WeightStream(again._scorer.policy, adapters_only=True)
            adapters = {key: weight.numpy().copy() for bucket in stream for key, weight in bucket.items()}
            assert adapters
            weights |= adapters if context.rank == 0 else {}
        found[name] = metrics, again.canary_logprobs(CANARY), weights
    return found


@pytest.mark.parametrize(("layout", "family"), [("pp2", "llama"), *[("pp2vpp2", "llama_deep")] * RUNS_ALL])
def test_a_pipeline_trains_like_one_rank(layout: str, family: str, tmp_path: Path):
    batch = batch_with_values(family)
    (truths,) = on_ranks(tmp_path, 1, trained, "one", family, batch, tmp_path / "one")
    stages = on_ranks(tmp_path, 2, trained, layout, family, batch, tmp_path / layout)
    for name, (metrics, canary, expected) in truths.items():
        found = [stage[name] for stage in stages]
        for step, truth in zip(found[0][0], metrics, strict=True):
            assert step == [pytest.approx(values, rel=1e-4, abs=1e-6) for values in truth], name
        assert all(np.abs(other - canary).max() < 1e-4 for _, other, _ in found), name
        weights = found[0][2] | found[1][2]
        assert len(weights) == len(found[0][2]) + len(found[1][2])
        assert weights.keys() == expected.keys()
        assert all(np.abs(weights[key] - value).max() < 1e-4 for key, value in expected.items()), name


def whole_pass(mesh: DeviceMesh, rank: int, layout: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return outputs and gradients of a pass that no schedule divides, as the checks of a start make."""
    config = in_mode(config_of("llama_deep", layout=layout), "packed")
    actor = ActorWorker.from_settings(RankContext("main", rank, layout_of(layout)), config, tiny_tokenizer())
    policy = actor._scorer.policy
    outputs = policy.probe(pack_rows([torch.arange(1, length) for length in (9, 4, 12)]))
    (outputs * torch.linspace(-1, 1, len(outputs))).sum().backward()
    add_tied_gradients(policy)
    return outputs.detach().numpy(), ranks._gradients(policy, "model.")


def test_a_pass_outside_of_a_schedule_runs_all_virtual_stages(tmp_path: Path):
    ((outputs, gradients),) = on_ranks(tmp_path, 1, whole_pass, "one")
    for found, parts in on_ranks(tmp_path, 2, whole_pass, "pp2vpp2"):
        assert np.abs(found - outputs).max() < 1e-5
        assert parts.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert np.linalg.norm(parts[name] - gradient) <= 1e-4 * np.linalg.norm(gradient), name


@patch.object(gathering, "_PIECE_BYTES", 1000)  # most weights are large, and gathered in pieces
def moved(mesh: DeviceMesh, rank: int, layout: str, batch: BatchedDataDict, folder: Path) -> Any:
    """Send a policy's weights to a critic, train and export it; read a policy's folder; return critic's values."""
    context, config = RankContext("main", rank, layout_of(layout)), in_mode(config_of("llama", layout=layout), "packed")
    actor = ActorWorker.from_settings(context, config, tiny_tokenizer())
    other = config.model_copy(update={"seed": config.seed + 1})
    critic = CriticWorker.from_settings(context, other, tiny_tokenizer())
    stream = actor.open_weights(WeightForm(torch.float32))
    critic.check_weights(stream)
    for index in range(len(stream)):
        buckets: list[Any] = [None] * context.num_ranks
        torch.distributed.all_gather_object(buckets, actor.export_bucket(index, WeightForm(torch.float32), 1))
        critic.load_bucket(next(bucket for bucket in buckets if bucket), 1)
    critic.finish_transfer(1)
    ranks._step(critic.train_step, context, config, batch, ValueLoss(0.1))
    critic.export_model(str(folder / "critic"))
    values = ranks._rows(critic.values, context, config, batch.keep(["input_ids", "response_mask"]))["values"].values
    actor.export_reference(str(folder / "policy"))
    torch.distributed.barrier()
    second = ActorWorker.from_settings(context, other, tiny_tokenizer())
    load_folder(second._scorer.policy, folder / "policy")
    states = full_state_dict(actor._scorer.policy), full_state_dict(second._scorer.policy)
    assert all(torch.equal(states[1][name], weight) for name, weight in states[0].items())
    with pytest.raises(ModelError, match="weights are missing"):
        load_folder(second._scorer.policy, folder / "critic")
    return values.numpy()


@pytest.mark.parametrize("layout", [pytest.param("pp2", marks=pytest.mark.long), "pp2dp2"])
def test_weights_move_between_pipelines_and_folders(tmp_path: Path, layout: str):
    batch = batch_with_values("llama")
    (expected,) = on_ranks(tmp_path, 1, moved, "one", batch, tmp_path / "one")
    for values in on_ranks(tmp_path, LAYOUTS[layout][0], moved, layout, batch, tmp_path / layout):
        assert np.abs(values - expected).max() < 1e-5
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "policy") for name in ("one", layout)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    heads = [(tmp_path / name / "critic" / "value_head.safetensors").stat().st_size for name in ("one", layout)]
    assert heads[0] == heads[1]


def pipeline() -> StageLink:
    return StageLink([torch.distributed.new_group()], [torch.distributed.new_group()], "cpu")


def exported(mesh: DeviceMesh, rank: int, folder: Path) -> int:
    """Export a stage of a model in several files; return the number of weights of the model that was cut."""
    settings = {key: value for key, value in FAMILIES["deepseek_v3"].items() if key != "model_type"}
    policy = Policy(tiny_model("deepseek_v3", dtype=torch.float32, **settings))
    assert any(name.endswith("e_score_correction_bias") for name in policy.model.state_dict())
    num_weights = policy.model.num_parameters()
    cut_model(policy, pipeline(), meta_copy(policy))
    export_model(policy, folder, rank=rank, num_ranks=2, file_bytes=9000)
    return num_weights


def test_the_index_of_an_export_counts_no_buffers_of_later_stages(tmp_path: Path):
    num_weights, _ = on_ranks(tmp_path, 2, exported, tmp_path / "model")
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    assert any(name.endswith("e_score_correction_bias") for name in index["weight_map"])
    assert index["metadata"]["total_parameters"] == num_weights


def loading_memory(mesh: DeviceMesh, rank: int, folder: str) -> tuple[int, int]:
    """Return how far memory rises while a stage loads its layers, and their size."""
    memory = MemoryRise()
    stored = open_causal_lm(Model(path=folder), attention_name="eager")
    policy = Policy(stored.model)
    cut_model(policy, pipeline(), meta_copy(policy))
    memory.start()
    stored.materialize(policy, "cpu")
    return memory.num_bytes, sum(weight.nbytes for weight in policy.parameters())


def test_memory_of_a_loading_stage_is_bounded_by_its_layers(tmp_path: Path):
    large_policy().model.save_pretrained(tmp_path / "model", max_shard_size="90MB")
    sizes = []
    for rise, part in on_ranks(tmp_path, 2, loading_memory, str(tmp_path / "model")):
        assert rise < 1.1 * part + 16 * MIB
        sizes.append(part)
    assert 200 * MIB < sum(sizes) < 220 * MIB


def wrong_stage(mesh: DeviceMesh, rank: int) -> str:
    """Return the error of a model that can't be cut."""
    model = tiny_model("llama", dtype=torch.float32)
    model.model.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    policy: PackedModel = Policy(model) if rank else ScalarHeadModel(model.model)
    try:
        cut_model(policy, pipeline(), meta_copy(policy))
    except ModelError as error:
        return str(error)
    return ""


def test_a_model_that_cannot_be_cut_is_an_error_on_every_rank(tmp_path: Path):
    for message in on_ranks(tmp_path, 2, wrong_stage):
        assert "can't be cut into pipeline stages: it has weights outside of embedding, layers" in message
        assert "set *.parallel.pp=1" in message

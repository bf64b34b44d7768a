"""Adapters, frozen weights and 8-bit moments on one rank and on two: steps, resuming and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config, Model, Rollout
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.config.sections.parallelism import Parallel
from rlpack.models.adapters import add_adapters
from rlpack.packing import Batching, make_plan
from tests.builders import MODEL, exported_weights, tiny_algorithm, tiny_config
from tests.distributed import actors
from tests.distributed.definition import difference, plain_model, scored, step_by_definition
from tests.distributed.processes import on_ranks
from tests.distributed.test_equivalence import BATCHINGS, RATE, SEVEN, TEMPERATURE, weigh

LORA = Lora(rank=3, alpha=12.0, targets=("*.[qv]_proj", "*mlp*"))
SCALE = LORA.alpha / LORA.rank
FROZEN = ("*embed_tokens*", "model.layers.0.*", "*.bias")
BATCH = scored(SEVEN, 5, TEMPERATURE)
ALGORITHM = tiny_algorithm(aggregation="token_mean")


def config_of(lora: Lora | None = None, **optimizer: Any) -> Config:
    config = tiny_config(algorithm=ALGORITHM, rollout=Rollout(temperature=TEMPERATURE))
    settings = Optimizer(**({"max_grad_norm": 1e9, "learning_rate": 1e-3} | optimizer))
    actor = config.actor.model_copy(update={"optimizer": settings, "lora": lora or Lora()})
    return config.model_copy(update={"actor": actor})


def shards_of(batching: Batching, size: int) -> list[BatchedDataDict]:
    plan = make_plan(BATCH["input_ids"].lengths.numpy(), batching, dp_size=size, mini_batch_size=4)
    return weigh(BATCH, plan, ALGORITHM).shard(plan)


class Adapted:
    """Gradient descent on A and B by the chain rule, from gradients of the base model at W + s·B·A."""

    def __init__(self) -> None:
        self.model = plain_model()
        seeded = plain_model().float()
        add_adapters(seeded, LORA, seed=tiny_config().seed)
        weights = {name: weight.detach().double() for name, weight in seeded.named_parameters()}
        self.down = {name[: -len(".lora_A.default.weight")]: w for name, w in weights.items() if ".lora_A." in name}
        self.up = {layer: weights[f"{layer}.lora_B.default.weight"] for layer in self.down}
        self.base = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.gradients: dict[str, Tensor] = {}

    def step(self, rows: range) -> dict[str, float]:
        metrics = step_by_definition(self.model, BATCH, rows, ALGORITHM, TEMPERATURE, RATE)
        through = {name: weight.grad for name, weight in self.model.named_parameters()}
        for layer in self.down:
            gradient = through[f"{layer}.weight"]
            of_down, of_up = SCALE * self.up[layer].T @ gradient, SCALE * gradient @ self.down[layer].T
            self.gradients |= {f"{layer}.lora_A.default.weight": of_down, f"{layer}.lora_B.default.weight": of_up}
            self.down[layer], self.up[layer] = self.down[layer] - RATE * of_down, self.up[layer] - RATE * of_up
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(self.merged(name))
        squares = sum(gradient.square().sum() for gradient in self.gradients.values())
        return metrics | {"actor/grad_norm": float(squares) ** 0.5}

    def merged(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        return self.base[name] + SCALE * self.up[layer] @ self.down[layer] if layer in self.down else self.base[name]


@pytest.mark.parametrize("size", [1, 2])
def test_adapters_take_the_steps_of_the_definition_however_rows_are_batched(tmp_path: Path, size: int):
    truth = Adapted()
    expected = [truth.step(rows) for rows in (range(4), range(4, 7))]
    cases = [(config_of(LORA), shards_of(batching, size)) for batching in BATCHINGS.values()]
    for outcomes in zip(*on_ranks(tmp_path, size, actors.updates, cases, RATE), strict=True):
        for step, metrics in zip(merge_steps([o.results[0] for o in outcomes]), expected, strict=True):
            assert step == pytest.approx(metrics, rel=1e-4, abs=1e-8)
        found = outcomes[0]
        assert found.gradients.keys() == truth.gradients.keys()  # and no other weight has one
        for name, gradient in truth.gradients.items():
            assert (found.gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("size", [1, 2])
def test_exports_are_merged_and_do_not_disturb_training(tmp_path: Path, size: int):
    shards, folder = shards_of(BATCHINGS["packed"], size), tmp_path / "model"
    weights = on_ranks(tmp_path, size, actors.export, config_of(LORA, learning_rate=0.01), shards, folder)[0]
    base = {name: weight.detach().float() for name, weight in plain_model().named_parameters()}
    assert [name for name in weights if "/" not in name] == list(base)
    changed = {name for name in base if not torch.equal(weights[name], base[name])}
    assert changed == {name for name in base if ".mlp." in name or "q_proj.weight" in name or "v_proj.weight" in name}

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not [name for name in model.state_dict() if "lora" in name or "base_layer" in name]
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors"}
    assert "adapter_config.json" not in {path.name for path in folder.iterdir()}
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    undisturbed = on_ranks(tmp_path, size, two_updates, config_of(LORA, learning_rate=0.01), shards)[0]
    assert all(torch.equal(weights[f"after/{name}"], undisturbed[name]) for name in base)


def two_updates(mesh: Any, rank: int, config: Config, shards: list[BatchedDataDict]) -> dict[str, Tensor]:
    actor = actors.new_actor(config, rank, mesh.size())
    for _ in range(2):
        actor.train_step(shards[rank], actors.policy_loss(config))
    return exported_weights(actor)


@pytest.mark.parametrize("size", [1, 2])
def test_frozen_weights_stay_and_the_others_take_the_steps_of_the_definition(tmp_path: Path, size: int):
    model, outcomes = plain_model(), []
    base = {name: weight.detach().float() for name, weight in model.named_parameters()}
    frozen = {name for name in base if "embed" in name or "layers.0." in name or name.endswith(".bias")}
    gradients: dict[str, Tensor] = {}
    for rows in (range(4), range(4, 7)):
        step_by_definition(model, BATCH, rows, ALGORITHM, TEMPERATURE, RATE)
        gradients = {name: weight.grad for name, weight in model.named_parameters() if name not in frozen}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(base[name] if name in frozen else weight)
    cases = [(config_of(freeze=FROZEN), shards_of(batching, size)) for batching in BATCHINGS.values()]
    outcomes = [outcome for rank in on_ranks(tmp_path, size, actors.updates, cases, RATE) for outcome in rank]
    for outcome in outcomes:
        assert difference(outcome.gradients, gradients) < 1e-4
        assert all(torch.equal(outcome.weights[name], base[name]) for name in frozen)
        assert difference({n: w for n, w in outcome.weights.items() if n not in frozen}, trained(model, frozen)) < 1e-5


def trained(model: torch.nn.Module, frozen: set[str]) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters() if name not in frozen}


KINDS = {
    "adapters": config_of(LORA, weight_decay=0.1),
    "dropout": config_of(LORA.model_copy(update={"dropout": 0.3})),
    "freeze": config_of(freeze=FROZEN, weight_decay=0.1, no_decay=("lm_head.weight",)),
    "eight_bit": config_of(name="adamw_8bit", freeze=("*.bias",), weight_decay=0.1),
}
_ACTOR = KINDS["eight_bit"].actor.model_copy(update={"parallel": Parallel(dp_replicate=2)})
KINDS["eight_bit_in_replicas"] = KINDS["eight_bit"].model_copy(update={"actor": _ACTOR})
# Weights of a rank's experts large enough for 8 bits.
_EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
KINDS["eight_bit_experts"] = KINDS["eight_bit"].model_copy(
    update={
        "model": Model(config=MODEL | _EXPERTS),
        "actor": _ACTOR.model_copy(update={"parallel": Parallel(ep=2), "optimizer": Optimizer(name="adamw_8bit")}),
    }
)


@pytest.mark.usefixtures("eight_bit")
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("adapters", 1), ("dropout", 2), ("eight_bit_in_replicas", 4), ("eight_bit_experts", 2)),
        *(pytest.param(kind, 2, marks=pytest.mark.long) for kind in ("adapters", "freeze", "eight_bit")),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, kind: str, size: int):
    config, folder = KINDS[kind], tmp_path / "actor"
    shards = shards_of(BATCHINGS["packed"], size)
    saved = on_ranks(tmp_path, size, actors.save_and_go_on, config, shards, folder)
    loaded = on_ranks(tmp_path, size, actors.load_and_go_on, config, shards, folder, kind != "dropout")
    for ours, theirs in zip(saved, loaded, strict=True):
        assert ours[1].results == theirs[1].results
        for one, other in zip(ours, theirs, strict=True):
            assert one.weights.keys() == other.weights.keys()
            assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())
    before, after = saved[0]
    assert after.gradients
    assert not any(torch.equal(before.weights[name], after.weights[name]) for name in after.gradients)


def test_adapters_resume_from_a_checkpoint_on_fewer_ranks(tmp_path: Path):
    config, folder = config_of(LORA), tmp_path / "actor"
    shards = [shards_of(BATCHINGS["packed"], size) for size in (1, 2)]
    two = on_ranks(tmp_path, 2, actors.save_and_go_on, config, shards[1], folder)
    ((loaded, after),) = on_ranks(tmp_path, 1, actors.load_and_go_on, config, shards[0], folder)
    assert all(torch.equal(loaded.weights[name], weight) for name, weight in two[0][0].weights.items())
    # AdamW divides by gradients, so a weight whose gradient is near zero moves by rounding alone.
    assert difference(after.weights, two[0][1].weights) < 1e-3

"""Layers of stages, and which models can be cut."""

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.family_configs import tiny_config as family_config
from rlpack.models import attention
from rlpack.models.inputs import pack_rows
from rlpack.models.loading import build_from_config
from rlpack.models.pipeline_parallel import cut_model, meta_copy, stage_layers
from rlpack.models.policy import Policy
from rlpack.models.stage_link import StageLink
from rlpack.models.stage_wiring import wiring_problem
from tests.unit.models.tiny import tiny_model


def test_every_layer_is_on_one_stage():
    for num_layers in range(1, 13):
        for num_stages in range(1, num_layers + 1):
            parts = stage_layers(num_layers, num_stages)
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            sizes = [len(part) for part in parts]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1


def on_meta(kind: str, **settings: Any) -> Any:
    config = family_config(kind)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# Those that the guide names.
PLAIN = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("deepseek_v3", "olmo2", "glm4", "mixtral"),
)


class InProcess:
    """The link of a stage to others in the same process, which run one after the other."""

    def __init__(self, rank: int, num_stages: int, sent: list[torch.Tensor], num_virtual: int = 1) -> None:
        self.rank, self.num_stages, self.num_virtual, self._sent = rank, num_stages, num_virtual, sent
        self.is_first, self.is_last = rank == 0, rank == num_stages - 1

    def receive(self, *shape: int, after: torch.Tensor | None) -> torch.Tensor:
        states = self._sent.pop()
        assert states.shape == shape
        return states

    def send(self, states: torch.Tensor) -> torch.Tensor:
        self._sent.append(states)
        return torch.zeros_like(states)


@torch.no_grad()
@pytest.mark.parametrize("kind", PLAIN)
def test_stages_have_the_outputs_of_the_whole_model(kind: str):
    torch.manual_seed(0)
    whole = Policy(build_from_config(family_config(kind), attention.NAME, kind)).eval()
    names = {name for name, _ in whole.stored_tensors()}
    rows = pack_rows([torch.arange(length) % 30 for length in (23, 5, 40)])  # longer than the windows
    num_stages, sent, found = min(3, whole.model.config.num_hidden_layers), [], set()
    for rank in range(num_stages):
        stage, link = copy.deepcopy(whole), cast(StageLink, InProcess(rank, num_stages, sent))
        cut_model(stage, link, meta_copy(whole))
        logprobs = stage(rows).logprobs
        own = {name for name, _ in stage.stored_tensors()}
        assert own == {name for name in names if rank in stage.stages_of(name)}
        found |= own
    assert torch.equal(logprobs, whole(rows).logprobs)
    assert found == names
    assert num_stages > 1


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "qwen3_moe"])
def test_virtual_stages_have_the_outputs_of_the_whole_model(kind: str):
    torch.manual_seed(0)
    config = family_config(kind)
    config.num_hidden_layers = 7
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index % len(config.layer_types)] for index in range(7)]
    whole = Policy(build_from_config(config, attention.NAME, kind)).eval()
    rows = pack_rows([torch.arange(length) % 30 for length in (23, 5, 40)])
    sent: list[torch.Tensor] = []
    ranks = [copy.deepcopy(whole) for _ in range(2)]
    for rank, stage in enumerate(ranks):
        cut_model(stage, cast(StageLink, InProcess(rank, 2, sent, num_virtual=3)), meta_copy(whole))
    for number in range(3):
        for stage in ranks:
            with stage.virtual_stage(number):
                logprobs = stage(rows).logprobs
                assert stage.has_outputs == (number == 2 and stage is ranks[1])
    assert torch.equal(logprobs, whole(rows).logprobs)
    own = [{name for name, _ in stage.stored_tensors()} for stage in ranks]
    layers = [{name.split("layers.")[1].split(".")[0] for name in names if "layers." in name} for names in own]
    assert layers == [{"0", "1", "3", "5"}, {"2", "4", "6"}]  # stages of 2, 1, 1, 1, 1, 1 layers
    for rank, stage in enumerate(ranks):
        assert own[rank] == {name for name, _ in whole.stored_tensors() if rank in stage.stages_of(name)}
        assert stage.has_outputs == (rank == 1)


@pytest.mark.parametrize("kind", PLAIN)
def test_models_of_embedding_layers_and_norm_can_be_cut(kind: str):
    model = on_meta(kind)
    assert wiring_problem(model) is None
    assert wiring_problem(model.base_model) is None
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("granite", "layer 0 doesn't get what the embedding returns"),
        ("gemma4_text", "weights outside of embedding, layers, norm and head"),
        ("gemma3n_text", "weights outside of embedding, layers, norm and head"),
        ("gpt_neox", "GPTNeoXModel has no embed_tokens, layers and norm"),
    ],
)
def test_models_with_more_than_that_are_refused(kind: str, problem: str):
    assert problem in str(wiring_problem(on_meta(kind)))


def wired(**forwards: Any) -> Any:
    """Return a model on the meta device whose base has another forward pass."""
    model = tiny_model("llama").to("meta")
    for name, forward in forwards.items():
        setattr(model.model, name, forward.__get__(model.model))
    return model


def run_layers(base: Any, order: list[int], input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
    hidden = first = base.embed_tokens(input_ids)
    for index in order:
        hidden = base.layers[index](hidden, **options | ({"residual": first} if options.get("residual") else {}))
    return SimpleNamespace(last_hidden_state=base.norm(hidden))


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (lambda self, input_ids, use_cache: run_layers(self, [0, 1], input_ids), None),
        (lambda self, input_ids, use_cache: run_layers(self, [1, 0], input_ids), "once each, in order"),
        (lambda self, input_ids, use_cache: run_layers(self, [0, 1, 1], input_ids), "once each, in order"),
        (lambda self, input_ids, use_cache: run_layers(self, [0, 1], input_ids, states={}), "reads more than what"),
        (lambda self, input_ids, use_cache: run_layers(self, [0, 1], input_ids, residual=True), "reads more than what"),
        (
            lambda self, input_ids, use_cache: SimpleNamespace(
                last_hidden_state=run_layers(self, [0, 1], input_ids).last_hidden_state * 2
            ),
            "changes what the norm returns",
        ),
        (lambda self, input_ids, use_cache: 1 / 0, "can't be followed (ZeroDivisionError"),
    ],
)
def test_other_orders_and_operations_between_layers_are_found(forward: Any, problem: str | None):
    found = wiring_problem(wired(forward=forward))
    assert found is None if problem is None else problem in str(found)


def test_layers_that_share_a_weight_are_refused():
    model = wired()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert wiring_problem(model) == "layers share the weight layers.1.mlp.up_proj.weight"

"""Schedules, layers of stages, and which models can be cut."""

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
from rlpack.models.pipeline_parallel import Turn, cut_model, meta_copy, pipeline_turns, stage_layers
from rlpack.models.policy import Policy
from rlpack.models.stage_link import StageLink
from rlpack.models.stage_wiring import wiring_problem
from tests.unit.models.tiny import tiny_model


def turns(microbatches: int, rank: int, num_stages: int) -> list[Turn]:
    link = cast(StageLink, SimpleNamespace(rank=rank, num_stages=num_stages))
    return list(pipeline_turns(microbatches, link))


def most_in_flight(schedule: list[Turn]) -> int:
    """Return the largest number of forward passes without their backward pass."""
    open_passes, most = 0, 0
    for turn in schedule:
        open_passes += 1 if turn.direction == "forward" else -1
        most = max(most, open_passes)
    return most


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [0, 1, 2, 3, 4, 7, 8])
def test_schedules_of_all_stages_end_together(num_stages: int, microbatches: int):
    schedules = [turns(microbatches, rank, num_stages) for rank in range(num_stages)]
    for rank, schedule in enumerate(schedules):
        for direction in ("forward", "backward"):
            assert [turn.microbatch for turn in schedule if turn.direction == direction] == list(range(microbatches))
        assert most_in_flight(schedule) == min(num_stages - rank, microbatches)
    # Run the schedules: a forward pass waits for the previous stage's, a backward pass for the next stage's.
    places, done = [0] * num_stages, set()
    while any(place < len(schedule) for place, schedule in zip(places, schedules, strict=True)):
        moved = False
        for rank, schedule in enumerate(schedules):
            if places[rank] == len(schedule):
                continue
            direction, number = schedule[places[rank]]
            neighbor = rank - 1 if direction == "forward" else rank + 1
            if neighbor in {-1, num_stages} or (neighbor, direction, number) in done:
                done.add((rank, direction, number))
                places[rank] += 1
                moved = True
        assert moved, "every stage waits for another"


def test_without_stages_each_forward_pass_is_followed_by_its_backward_pass():
    expected = [Turn("forward", 0), Turn("backward", 0), Turn("forward", 1), Turn("backward", 1)]
    assert list(pipeline_turns(2, None)) == expected
    assert turns(3, 0, 2)[:4] == [Turn("forward", 0), Turn("forward", 1), Turn("backward", 0), Turn("forward", 2)]


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

    def __init__(self, rank: int, num_stages: int, sent: list[torch.Tensor]) -> None:
        self.rank, self.num_stages, self._sent = rank, num_stages, sent
        self.is_first, self.is_last = rank == 0, rank == num_stages - 1

    def receive(self, *shape: int) -> torch.Tensor:
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

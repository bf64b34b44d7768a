"""New models in parts: values, buffers and ties of the model built whole, and one weight in memory at a time."""

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.schema import Model
from rlpack.models.errors import ModelError
from rlpack.models.initialization import recorded
from rlpack.models.loading import build_causal_lm, build_from_config
from rlpack.models.new_model import NewModel
from rlpack.models.open_model import open_new_causal_lm
from rlpack.models.stored_model import NotInPartsError

# gpt2 draws some weights twice, mamba computes some from others, and gemma3_text has buffers of two kinds.
FAMILIES = ("llama", "qwen2", "gemma3_text", "qwen3_moe", "mixtral", "deepseek_v3", "gpt2", "mamba", "opt", "phi3")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def shared(model: nn.Module) -> set[frozenset[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return {frozenset(group) for group in names.values()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_values_buffers_and_ties_are_those_of_the_model_built_whole(family: str, tied: bool):
    config = family_config(family)
    config.tie_word_embeddings = tied
    state = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        whole = build_from_config(copy.deepcopy(config), "eager", family)
    opened = NewModel.open(copy.deepcopy(config), "eager", 3, family)
    assert all(weight.is_meta for weight in opened.model.parameters())
    opened.materialize(opened.model, "cpu")
    expected, found = tensors(whole), tensors(opened.model)
    assert found.keys() == expected.keys()
    assert shared(opened.model) == shared(whole)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_of_the_configuration_is_the_one_built_whole():
    model = Model(config={"model_type": "llama", **SIZES})
    whole = build_causal_lm(model, vocab_size=50, pad_token_id=1, seed=5, attention_name="eager")
    opened = open_new_causal_lm(model, vocab_size=50, pad_token_id=1, seed=5, attention_name="eager")
    opened.materialize(opened.model, "cpu")
    assert opened.model.config.to_dict() == whole.config.to_dict()
    assert all(torch.equal(opened.model.state_dict()[name], weight) for name, weight in whole.state_dict().items())


def test_parts_of_a_model_get_the_same_values():
    config = family_config("llama")
    opened, truth = (NewModel.open(copy.deepcopy(config), "eager", 3, "llama") for _ in range(2))
    truth.materialize(truth.model, "cpu")
    opened.materialize(opened.model.get_submodule("model.layers.1"), "cpu")
    assert opened.model.get_input_embeddings().weight.is_meta
    for name, weight in opened.model.get_submodule("model.layers.1").named_parameters():
        assert torch.equal(weight, truth.model.get_submodule("model.layers.1").get_parameter(name))


def test_a_tensor_has_memory_only_until_it_is_overwritten_or_read_for_the_last_time():
    with recorded() as record:
        layers = [nn.Linear(100, 100, bias=False) for _ in range(5)]
        for layer in layers:  # as transformers does after the constructors
            nn.init.normal_(layer.weight)
        scale = torch.ones(3) * 2.0
    places = {record.place_of(layer.weight): index for index, layer in enumerate(layers)}
    torch.manual_seed(11)
    truth = [nn.Linear(100, 100, bias=False) for _ in range(5)]
    for layer in truth:
        nn.init.normal_(layer.weight)
    sizes, order = [], []
    for place, value in record.values([*places, record.place_of(scale)], 11):
        if place in places:
            order.append(places[place])
            assert torch.equal(value, truth[places[place]].weight)
        else:
            assert value.tolist() == [2.0, 2.0, 2.0]
        sizes.append(value.untyped_storage().nbytes())
    assert order == [0, 1, 2, 3, 4]
    assert sizes == [40_000] * 5 + [12]


def test_a_model_whose_code_reads_values_is_not_built_in_parts(monkeypatch: pytest.MonkeyPatch):
    model = Model(config={"model_type": "llama", **SIZES})
    forward = nn.Embedding.reset_parameters

    def reads_a_value(self: nn.Embedding) -> None:
        forward(self)
        assert self.weight.sum().item() != 7.0

    monkeypatch.setattr(nn.Embedding, "reset_parameters", reads_a_value)
    with pytest.raises(NotInPartsError, match="DataDependent"):
        open_new_causal_lm(model, vocab_size=50)


def test_a_model_with_tensors_elsewhere_is_not_built_in_parts(monkeypatch: pytest.MonkeyPatch):
    model = Model(config={"model_type": "llama", **SIZES})
    forward = nn.Embedding.reset_parameters

    def keeps_a_tensor(self: nn.Embedding) -> None:
        forward(self)
        vars(self)["scales"] = {"all": [torch.ones(2)]}

    monkeypatch.setattr(nn.Embedding, "reset_parameters", keeps_a_tensor)
    with pytest.raises(NotInPartsError, match=r"model\.embed_tokens keeps tensors"):
        open_new_causal_lm(model, vocab_size=50)


def test_a_misspelt_setting_is_named():
    with pytest.raises(ModelError, match="hiden_size"):
        open_new_causal_lm(Model(config={"model_type": "llama", "hiden_size": 3}), vocab_size=50)

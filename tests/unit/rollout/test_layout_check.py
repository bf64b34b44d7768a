"""Whether a stream of weights fits a model; names and shapes are the models' own."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpack.batch.weight_layout import TensorSpec, WeightLayout
from rlpack.rollout.errors import EngineError
from rlpack.rollout.layout_check import check_layout, tied_names
from tests.unit.rollout.builders import SIZES


def model(*, tied: bool, on_meta: bool = False) -> Qwen2ForCausalLM:
    with torch.device("meta" if on_meta else "cpu"):
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))


def layout(shapes: dict[str, tuple[int, ...]]) -> WeightLayout:
    return WeightLayout(tuple((TensorSpec(name, shape, torch.float32),) for name, shape in shapes.items()))


def all_shapes(*, tied: bool) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in model(tied=tied).named_parameters()}


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_models_own_parameters_fit_also_without_memory(tied: bool, on_meta: bool):
    built, shapes = model(tied=tied, on_meta=on_meta), all_shapes(tied=tied)
    assert ("lm_head.weight" in shapes) is not tied
    check_layout(built, layout(shapes))


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_tied_weight_may_come_under_any_one_of_its_names(on_meta: bool):
    built, shapes = model(tied=True, on_meta=on_meta), all_shapes(tied=True)
    shape = shapes["model.embed_tokens.weight"]
    # The actor's files hold both.
    text = r"model.embed_tokens.weight and lm_head.weight are separate weights .* set tie_word_embeddings=false in the"
    with pytest.raises(EngineError, match=text):
        check_layout(built, layout(shapes | {"lm_head.weight": shape}))
    del shapes["model.embed_tokens.weight"]
    check_layout(built, layout(shapes | {"lm_head.weight": shape}))


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm_head.weight": None}, r"missing \['lm_head\.weight'\], unknown \[\], wrong shape \[\]"),
        ({"model.norm.weight": None}, r"missing \['model\.norm\.weight'\], unknown \[\]"),
        ({"model.layers.9.x": (3,)}, r"missing \[\], unknown \['model\.layers\.9\.x'\]"),
        ({"model.norm.weight": (33,)}, r"missing \[\], unknown \[\], wrong shape \['model\.norm\.weight'\]"),
        ({"lm_head.weight": (32, 24)}, r"wrong shape \['lm_head\.weight'\]"),
    ],
    ids=["no head", "no norm", "an unknown one", "a longer one", "a transposed one"],
)
def test_what_does_not_fit_is_named(changes, words, on_meta: bool):
    shapes = {name: shape for name, shape in (all_shapes(tied=False) | changes).items() if shape is not None}
    with pytest.raises(EngineError, match=words):
        check_layout(model(tied=False, on_meta=on_meta), layout(shapes))


def test_the_further_names_of_a_tied_weight_come_under_its_first():
    assert tied_names(model(tied=True, on_meta=True)) == {"model.embed_tokens.weight": ["lm_head.weight"]}
    assert tied_names(model(tied=False)) == {}

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlpack.config.schema import Algorithm, Config, Model
from rlpack.models.errors import ModelError
from rlpack.models.loading import build_meta_model
from rlpack.startup.annotations import is_wrong
from rlpack.startup.model_settings import check_model_settings
from rlpack.startup.transformers_sources import config_source, is_not_causal, is_unknown_type, model_types

SMALL = {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "intermediate_size": 16}

WRONG = {
    "a type that doesn't exist": (
        {"model_type": "gtp"},
        r"model_type is 'gtp', .* does not know; try \w+",
    ),
    "a setting that doesn't exist": ({"hidden_sizee": 9}, r"model.config.hidden_sizee is not a .*did you mean hidden_"),
    "a setting of another type": (
        {"n_embd": 9},
        r"n_embd is not a setting of qwen2; ~model\.config\.n_embd removes what a preset .*; its settings are",
    ),
    "text for a number": ({"hidden_size": "wide"}, "not a valid qwen2 config.*hidden_size"),
    "a fraction": ({"num_hidden_layers": 1.5}, "not a valid qwen2 config.*num_hidden_layers"),
    "a list for a number": ({"hidden_size": [16]}, "not a valid qwen2 config.*hidden_size"),
    "a number for text": ({"hidden_act": 3}, "not a valid qwen2 config.*hidden_act"),
    "a number for a dictionary": ({"rope_parameters": 3}, "not a valid qwen2 config.*rope_parameters"),
    "text for a list": ({"layer_types": "full_attention"}, "not a valid qwen2 config.*layer_types"),
    "an unknown activation": ({"hidden_act": "silly"}, "model.config does not build a qwen2: .*'silly'"),
    "a negative size": ({"intermediate_size": -5}, "model.config does not build a qwen2: "),
    "no heads": ({"num_attention_heads": 0}, "model.config does not build a qwen2: "),
    "no heads of keys": ({"num_key_value_heads": 0}, "model.config does not build a qwen2: "),
    "heads of no size": ({"head_dim": 0}, "model.config does not build a qwen2: "),
    "a negative size of heads": ({"head_dim": -8}, "model.config does not build a qwen2: "),
    "a negative width": ({"hidden_size": -16}, "model.config does not build a qwen2: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_refused_as_by_transformers_itself(name):
    settings, message = WRONG[name]
    model = Model(config=SMALL | settings)
    with pytest.raises(ModelError, match=message):
        check_model_settings(Config(model=model))
    with pytest.raises(ModelError, match=message):
        build_meta_model(model, vocab_size=8)


def test_no_setting_that_a_model_type_has_is_refused():
    assert set(model_types()) == set(CONFIG_MAPPING)
    sources = {kind: config_source(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING}
    sources = {kind: source for kind, source in sources.items() if source is not None}
    assert len(sources) > 0.85 * len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {"qwen2", "llama", "gpt2"} <= sources.keys()
    for kind, source in sources.items():
        assert not is_unknown_type(kind)
        assert not is_not_causal(kind)
        try:
            values = AutoConfig.for_model(kind).to_dict()
        except StrictDataclassError:  # it has no valid defaults
            continue
        assert (kind, [key for key in values if not source.may_have(key)]) == (kind, [])
        wrong = [key for key, value in values.items() if key in source.fields and is_wrong(value, source.fields[key])]
        assert (kind, wrong) == (kind, [])


def test_a_size_of_heads_is_refused_where_the_attention_does_not_read_it():
    settings = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    model = Model(config=settings | {"model_type": "gpt_neox", "head_dim": 4})  # its rotary embedding does read it
    for check in (lambda: check_model_settings(Config(model=model)), lambda: build_meta_model(model, vocab_size=8)):
        with pytest.raises(ModelError, match="head_dim is not a setting of gpt_neox"):
            check()


def test_what_only_later_checks_of_the_model_refuse_is_refused():
    for settings, message in (
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "not divisible by num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ):
        with pytest.raises(ModelError, match=message):
            check_model_settings(Config(model=Model(config=SMALL | settings)))
    latent = {"model_type": "deepseek_v3", "num_key_value_heads": 3, "num_attention_heads": 4}
    check_model_settings(Config(model=Model(config=latent)))  # which doesn't use the number


def test_a_type_without_a_causal_model_is_refused_as_by_transformers_itself():
    model = Model(config={"model_type": "t5"})
    for check in (lambda: check_model_settings(Config(model=model)), lambda: build_meta_model(model, vocab_size=8)):
        with pytest.raises(ModelError, match="a t5, which is not a causal language model"):
            check()


def test_a_type_that_users_code_may_add_is_left_to_the_recipe():
    model = Model(config={"model_type": "mine"})
    with pytest.raises(ModelError, match="'mine'"):
        check_model_settings(Config(model=model))
    check_model_settings(Config(model=model, algorithm=Algorithm(loss="mine:loss")))


def test_a_folder_of_a_type_that_transformers_lacks_is_refused_as_by_transformers_itself(tmp_path):
    path = tmp_path / "config.json"
    model = Model(path=str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for auto_map, message in (({"AutoConfig": "code.Config"}, "model.trust_remote_code=true"), ({}, "can't be loaded")):
        path.write_text(json.dumps({"model_type": "strange", "auto_map": auto_map}))
        with pytest.raises(ModelError, match=message):
            check_model_settings(Config(model=model))
        with pytest.raises(ModelError, match=message):
            build_meta_model(model)
        check_model_settings(Config(model=model.model_copy(update={"trust_remote_code": True, "revision": "0" * 40})))
    path.write_text(json.dumps({"model_type": "qwen2", "auto_map": {"AutoConfig": "code.Config"}}))
    check_model_settings(Config(model=model))

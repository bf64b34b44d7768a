import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.family_configs import tiny_config
from rlpack.config.compose import compose
from rlpack.models.errors import ModelError
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.loading import build_meta_model
from rlpack.models.optimizers import freeze
from rlpack.models.packed import language_model
from rlpack.startup.weight_names import weight_names
from rlpack.startup.weight_patterns import check_weight_patterns
from rlpack.workers.build import set_trained_weights

# One of each kind: merged experts, linear attention, one-dimensional convolutions, a list of several kinds of layers.
FAMILIES = (
    "qwen2",
    "qwen3_moe",
    "gpt2",
    "qwen3_next",
    "jamba",
    "gemma2",
    "jetmoe",
    "roc_bert",
    "deepseek_v3",
    "apertus",
)

WRONG = {
    "actor.optimizer.freeze": ["zz*", "layers.0.*", "model.layers.2.*", "transformer.h.*", "model.layers.[5-9].*"],
    "actor.optimizer.no_decay": ["*.o_proj.bias", "q_porj"],
    "critic.optimizer.freeze": ["lm_head*", "model.model.*", "model.embed_tokens"],
    "actor.lora.targets": ["*.qkv_proj", "model.layers.2.*", "lm_head"],
}
RIGHT = {
    "actor.optimizer.freeze": ["model.layers.[01].*", "*norm*", "lm_head.weight"],
    "actor.optimizer.no_decay": ["*.q_proj.bias", "*embed_tokens*"],
    "critic.optimizer.freeze": ["head.*", "model.embed_tokens.*"],
    "actor.lora.targets": ["*.q_proj", "model.layers.1.*"],
}


def config_with(key, pattern):
    recipe = ["recipe=ppo"] if key.startswith("critic") else []
    return compose([*recipe, *(["actor.lora.rank=2"] if "lora" in key else []), f"{key}=['{pattern}']"])


def match_with_model(config):
    """Match the patterns with the weights of the model, as ranks do."""
    model = build_meta_model(config.model, vocab_size=8)
    if config.recipe.name == "ppo":
        freeze(ScalarHeadModel(language_model(model)), config.critic.optimizer, "critic.optimizer")
    else:
        set_trained_weights(model, config.actor, seed=0)


@pytest.mark.parametrize(("key", "pattern"), [(key, pattern) for key, some in WRONG.items() for pattern in some])
def test_a_pattern_that_matches_nothing_is_refused_as_by_the_model(key, pattern):
    config = config_with(key, pattern)
    for check in (check_weight_patterns, match_with_model):
        with pytest.raises(ModelError) as caught:
            check(config)
        assert f"{key} contains '{pattern}', which matches no name; the nearest are " in str(caught.value)


@pytest.mark.parametrize(("key", "pattern"), [(key, pattern) for key, some in RIGHT.items() for pattern in some])
def test_a_pattern_that_matches_passes(key, pattern):
    config = config_with(key, pattern)
    match_with_model(config)
    check_weight_patterns(config)


def test_the_patterns_of_a_folder_are_matched_with_its_own_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    overrides = ["model=pretrained", f"model.path={tmp_path}"]
    check_weight_patterns(compose([*overrides, "actor.optimizer.freeze=['transformer.h.2.*']"]))
    with pytest.raises(ModelError, match=r"transformer.h.0.ln_1"):
        check_weight_patterns(compose([*overrides, "actor.optimizer.freeze=['transformer.h.3.*']"]))


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_weight_of_a_model_is_missed(kind):
    missed(kind)


@pytest.mark.slow
def test_no_weight_of_any_model_is_missed():
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if kind in CONFIG_MAPPING:
            missed(kind)


def missed(kind):
    try:
        config = tiny_config(kind)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001 - no tiny model of this type can be built
        return
    weights = weight_names(kind, config.to_dict())
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if weights is None:
        return
    assert [name for name in names if name not in weights.names and not weights.is_open_to(name)] == []
    linear = [f"{name}.weight" for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    assert [name for name in linear if not weights.names.get(name) and not weights.is_open_to(name)] == []

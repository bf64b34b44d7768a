import json
import socket
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.schema import Config, Model
from rlpack.config.sections.value_models import Critic, RewardModel
from rlpack.data.tokenization import character_tokenizer
from rlpack.models.errors import ModelError
from rlpack.models.loading import (
    build_causal_lm,
    build_meta_classifier,
    build_meta_model,
    load_classifier,
    load_tokenizer,
    with_attention,
)
from rlpack.models.new_config import new_config
from rlpack.models.open_model import open_causal_lm, open_classifier
from rlpack.startup.model_settings import check_model_settings
from rlpack.worker import RankContext
from rlpack.workers.build import build_critic
from tests.builders import MODEL, tiny_config, tiny_tokenizer
from tests.unit.models.tiny import tiny_model

TINY = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


def unreachable(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def model_info(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr("rlpack.data.hub._QUESTIONS", {})


def test_a_new_model_uses_the_tokenizers_ids_and_the_seed_and_leaves_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (
        build_causal_lm(Model(config=TINY), vocab_size=11, eos_token_id=1, pad_token_id=0, seed=seed)
        for seed in (3, 3, 4)
    )
    assert torch.equal(torch.rand(1), expected)
    assert first.config.vocab_size == first.get_input_embeddings().weight.shape[0] == 11
    assert (first.config.eos_token_id, first.config.pad_token_id) == (1, 0)
    assert first.dtype == torch.float32
    assert first.config._attn_implementation == "rlpack"
    weights = [model.get_input_embeddings().weight[2] for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        (TINY | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, 2),
        ({"model_type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}, 4),
    ],
)
def test_a_new_model_takes_settings_under_transformers_common_names(settings: dict, heads: int):
    model = build_meta_model(Model(config=settings), vocab_size=11)
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.num_attention_heads) == (
        16,
        1,
        heads,
    )
    assert model.get_input_embeddings().weight.shape == (11, 16)
    experts = [module.num_experts for name, module in model.named_modules() if name.endswith(".experts")]
    assert experts == ([6] if "num_experts" in settings else [])


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "qwen3"])
def test_a_new_model_takes_the_size_of_a_head_even_if_its_config_does_not_declare_it(kind: str, tmp_path: Path):
    settings = TINY | {"model_type": kind, "head_dim": 6}
    check_model_settings(Config(model=Model(config=settings)))
    built = build_causal_lm(Model(config=settings), vocab_size=11, attention_name="sdpa")
    assert built.get_submodule("model.layers.0.self_attn.q_proj").out_features == 6 * TINY["num_attention_heads"]
    built.save_pretrained(tmp_path)
    input_ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids).logits, built(input_ids).logits)


def test_a_saved_model_comes_back_in_fp32_with_the_same_weights(tmp_path: Path):
    saved = tiny_model(dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    loaded = build_causal_lm(Model(path=str(tmp_path)), vocab_size=53, attention_name="sdpa")
    assert loaded.dtype == torch.float32
    assert loaded.config._attn_implementation == "sdpa"
    for (name, left), right in zip(loaded.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(left, right.float()), name


@pytest.mark.parametrize("model_type", ["qwen2", "deepseek_v3"])
def test_the_meta_model_of_bf16_files_has_the_dtypes_that_ranks_load(tmp_path: Path, model_type: str):
    AutoModelForCausalLM.from_config(family_config(model_type), dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    model = Model(path=str(tmp_path))
    opened = open_causal_lm(model, attention_name="sdpa").model
    assert _dtypes(build_meta_model(model)) == _dtypes(opened) == _dtypes(build_causal_lm(model, attention_name="sdpa"))


def test_the_meta_classifier_of_bf16_files_is_in_fp32_and_its_config_keeps_the_stored_dtype(tmp_path: Path):
    labels = AutoConfig.for_model(**TINY, vocab_size=11, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(labels, dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    built = build_meta_classifier(config, str(tmp_path))
    opened = open_classifier(RewardModel(path=str(tmp_path)), vocab_size=11, attention_name="sdpa").model
    assert _dtypes(built) == _dtypes(opened)
    assert config.dtype == torch.bfloat16


def _dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no model_type"),
        ({"model_type": "qwen22"}, "'qwen22'.*qwen2"),
        (TINY | {"hiden_size": 8}, r"model\.config\.hiden_size is not a setting of qwen2; did you mean hidden_size"),
        (TINY | {"hidden_size": "wide"}, "is not a valid qwen2 config"),
    ],
)
def test_an_invalid_config_is_named(settings: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build_causal_lm(Model(config=settings))


@pytest.mark.skipif("inkling2_text" not in CONFIG_MAPPING, reason="needs a newer transformers")
def test_a_new_model_has_as_many_outputs_as_tokens_unless_its_config_says_otherwise():
    config = {"model_type": "inkling2_text"}
    assert new_config(Model(config=config), vocab_size=53).unpadded_vocab_size == 53
    assert new_config(Model(config=config | {"unpadded_vocab_size": 50}), vocab_size=53).unpadded_vocab_size == 50


def test_a_tokenizer_larger_than_the_model_is_an_error(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="the tokenizer has 60 tokens and the model 53"):
        build_causal_lm(Model(path=str(tmp_path)), vocab_size=60)


def test_path_and_config_together_are_an_error():
    with pytest.raises(ModelError, match="are both set"):
        build_causal_lm(Model(path="somewhere", config=TINY))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "a/b/c"])
def test_a_path_that_is_not_a_folder_is_an_error_without_asking_the_hub(path: str, monkeypatch):
    unreachable(monkeypatch, AssertionError("the hub was asked"))
    with pytest.raises(ModelError, match=r"model\.path is .* not a folder"):
        build_causal_lm(Model(path=path))


def test_a_folder_without_a_model_is_an_error(tmp_path: Path):
    with pytest.raises(ModelError, match=r"model\.path is .*can't be loaded: there is no config\.json in it; set"):
        build_causal_lm(Model(path=str(tmp_path)))
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model\.tokenizer is .*can't be loaded: there is no tokenizer\.json or"):
        load_tokenizer(Model(tokenizer=str(tmp_path)))
    with pytest.raises(
        ModelError, match=r"model\.path is .*; set a folder that .*, or set model\.tokenizer to a folder"
    ):
        load_tokenizer(Model(path=str(tmp_path)))


def test_an_exported_character_tokenizer_keeps_spaces_and_marks_unknown_characters(tmp_path: Path):
    # transformers' AutoTokenizer makes a Qwen2Tokenizer of it, because of the model next to it, and drops both.
    tiny_model().save_pretrained(tmp_path)
    character_tokenizer("ab +\n").save_pretrained(tmp_path)
    loaded = load_tokenizer(Model(path=str(tmp_path)))
    assert loaded("a + b\nX").input_ids == [3, 5, 6, 5, 4, 7, 2]
    assert loaded.decode([3, 5, 6, 5, 4, 7]) == "a + b\n"


def test_mistrals_own_file_next_to_a_tokenizer_is_not_read(tmp_path: Path):
    pytest.importorskip("mistral_common", reason="vLLM, which installs it, is not installed")
    inner = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<eos>": 3}, [("a", "b")]))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tekken.json").write_text("{}")
    loaded = load_tokenizer(Model(path=str(tmp_path)))
    assert loaded("abb", split_special_tokens=True).input_ids == [2, 1]


@pytest.fixture
def silent_server():
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def check_that_a_hub_name_fails_fast() -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"'nobody/nothing-here'.*can't be reached"):
        build_causal_lm(Model(path="nobody/nothing-here"))
    assert time.monotonic() - start < 10


def test_a_hub_name_fails_fast_when_nothing_listens(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    check_that_a_hub_name_fails_fast()


def test_a_hub_name_fails_fast_when_nobody_answers(monkeypatch, silent_server: str):
    monkeypatch.setattr("rlpack.data.hub.DEADLINE_S", 0.3)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", silent_server)
    check_that_a_hub_name_fails_fast()


def test_a_hub_name_fails_fast_in_offline_mode(monkeypatch):
    unreachable(monkeypatch, OfflineModeIsEnabled("offline"))
    check_that_a_hub_name_fails_fast()


def test_a_name_that_the_hub_does_not_know_is_an_error(monkeypatch):
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)  # its arguments depend on the HTTP library
    unreachable(monkeypatch, error)
    with pytest.raises(ModelError, match="no such model"):
        build_causal_lm(Model(path="nobody/nothing-here"))


def test_a_model_with_code_of_its_own_names_the_key_that_allows_it(tmp_path):
    code = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": code}))
    (tmp_path / "strange.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ModelError, match=r"which isn't run unless model.trust_remote_code=true with model.revision"):
        build_meta_model(Model(path=str(tmp_path)))


def test_a_tokenizer_with_more_tokens_is_refused_without_weights(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = {"model_type": "qwen2", "vocab_size": 5, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    assert build_meta_model(Model(path=str(tmp_path)), vocab_size=5).num_parameters() > 0
    with pytest.raises(ModelError, match="the tokenizer has 6 tokens and the model 5"):
        build_meta_model(Model(path=str(tmp_path)), vocab_size=6)


def test_remote_code_needs_a_pinned_revision(monkeypatch):
    unreachable(monkeypatch, AssertionError("the hub was asked"))
    with pytest.raises(ModelError, match=r"pin it with model\.revision"):
        build_causal_lm(Model(path="nobody/nothing-here", trust_remote_code=True))


def test_a_tokenizer_from_another_repository_has_its_own_revision(monkeypatch):
    unreachable(monkeypatch, AssertionError("the hub was asked"))
    model = Model(path="a/model", tokenizer="a/tokenizer", revision="abc", trust_remote_code=True)
    with pytest.raises(ModelError, match=r"newest code from 'a/tokenizer'; pin it with model\.tokenizer_revision"):
        load_tokenizer(model)


def test_a_missing_tokenizer_is_an_error():
    with pytest.raises(ModelError, match=r"neither model\.tokenizer nor model\.path"):
        load_tokenizer(Model())


@pytest.mark.parametrize("missing", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_weights_that_the_files_lack_are_not_replaced_by_random_ones(tmp_path: Path, missing: str):
    build_causal_lm(Model(config=TINY), vocab_size=11).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[missing]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"lack 1 weights of a \w+, the first is {missing}; they would be random"):
        build_causal_lm(Model(path=str(tmp_path)), vocab_size=11)


def test_a_language_model_is_not_loaded_as_a_reward_model_with_a_random_head(tmp_path: Path):
    built = build_causal_lm(Model(config=TINY), vocab_size=11)
    built.config.num_labels = 1
    built.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"reward_model\.path .* the first is score\.weight; they would be random"):
        load_classifier(RewardModel(path=str(tmp_path)), vocab_size=11)


def test_a_damaged_file_of_weights_is_refused_by_its_key(tmp_path: Path):
    build_causal_lm(Model(config=TINY), vocab_size=11).save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(ModelError, match=r"model\.path is .*can't be loaded"):
        build_causal_lm(Model(path=str(tmp_path)), vocab_size=11)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("no folder", "which is not a folder"), ("lacks a weight", "lack 1 weights"), ("damaged", "can't be loaded")],
)
def test_errors_of_the_critics_own_model_name_its_key(fault: str, message: str, tmp_path: Path):
    folder = tmp_path / "critic"
    if fault != "no folder":
        build_causal_lm(Model(config=MODEL), vocab_size=len(tiny_tokenizer())).save_pretrained(folder)
        file = folder / "model.safetensors"
        weights = load_file(file)
        del weights["model.norm.weight"]
        save_file(weights, file, metadata={"format": "pt"})
        if fault == "damaged":
            file.write_bytes(file.read_bytes()[:3000])
    config = tiny_config(recipe="ppo", critic=Critic(path=str(folder)))
    with pytest.raises(ModelError, match=message) as error:
        build_critic(config, tiny_tokenizer(), RankContext())
    assert str(error.value).startswith(f"critic.path is {str(folder)!r}")


@pytest.mark.parametrize(
    ("key", "section"), [("model.path", ""), ("critic.path", "critic."), ("reward_model.path", "reward_model.")]
)
def test_a_model_with_a_fixed_table_of_attentions_names_the_batching_of_its_role(key: str, section: str):
    def build(name: str) -> PreTrainedModel:
        raise KeyError(name)

    with pytest.raises(ModelError, match=rf"can't run packed rows: .*; set {section}batching\.mode=dynamic or fixed"):
        with_attention(build, "rlpack", f"{key} ('somewhere')")

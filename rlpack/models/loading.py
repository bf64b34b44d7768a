"""Load models and tokenizers from a folder or the hub, or build a new model from a config. Safetensors only."""

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlpack.config.schema import Model
from rlpack.config.sections.value_models import RewardModel
from rlpack.data.tokenization import holds_character_tokenizer
from rlpack.models import attention, own_attention
from rlpack.models.cpu_products import use_faster_products
from rlpack.models.errors import (
    ModelError,
    not_causal_error,
    other_tokenizer_error,
    remote_code_error,
)
from rlpack.models.hub_models import hub_model_problem, revision_key, revision_of
from rlpack.models.new_config import new_config
from rlpack.models.quantized import dequantizing_arguments, forget_quantization, to_fp32
from rlpack.models.stored_weights import check_missing, untie_config
from rlpack.models.vocabulary import check_vocabulary
from rlpack.user_code import UserCode, UserCodeError

_log = logging.getLogger(__name__)

_CLOSED_ATTENTION = "its attention layers don't call transformers' attention interface"

_MODEL_FILES = ("config.json",)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def build_causal_lm(
    model: Model,
    *,
    vocab_size: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    attention_name: str = attention.NAME,
    key: str = "model.path",
) -> PreTrainedModel:
    """Load a causal language model, or build a new one; weights are fp32.

    Args:
        model: the `model` section: a path to load from, or `model.config` of a new model.
        vocab_size: the tokenizer's. A new model gets it; a loaded one must have at least as many tokens.
        eos_token_id: the tokenizer's, written into a new model's config.
        pad_token_id: the tokenizer's, likewise.
        seed: random seed for a new model's weights; the process's random state does not change.
        device: device of the model.
        attention_name: `rlpack` for a model that runs packed rows; `sdpa`, which falls back to `eager`, for one that
            runs padded rows or generates with a cache.
        key: configuration key of the path, for errors.

    Raises:
        ModelError: the path or hub name gives no model, the config has an unknown key or model type, the tokenizer has
            more tokens than the model, the model can't use the attention, or remote code is requested without a
            revision.
    """
    attention.register()
    if model.path is None:
        config = new_config(model, vocab_size=vocab_size, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also set the generators of all GPUs
            built = build_from_config(config, attention_name, f"model.config ({config.model_type})")
    else:
        if model.config:
            raise ModelError(
                f"model.path={model.path} and model.config ({', '.join(model.config)}) are both set; a loaded model "
                "has its own config, so set only one of them"
            )
        arguments = hub_arguments(model.path, model, key)
        built = _load_weights(AutoModelForCausalLM, model.path, key, arguments, attention_name)
    check_vocabulary(built, vocab_size)
    return cast(PreTrainedModel, nn.Module.to(built, device))


def build_from_config(config: PreTrainedConfig, attention_name: str, source: str) -> PreTrainedModel:
    """Return a language model with new random weights, in fp32.

    Args:
        config: the model's config, which the model keeps and changes.
        attention_name: as for `build_causal_lm`.
        source: where the config comes from, for the error.

    Raises:
        ModelError: the model can't use the attention.
    """
    attention.register()
    return with_attention(
        lambda name: AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.float32),
        attention_name,
        source,
    )


def load_classifier(
    settings: RewardModel,
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
    attention_name: str = attention.NAME,
) -> PreTrainedModel:
    """Load a sequence classifier with one label; weights are fp32.

    Args:
        settings: the `reward_model` section, with a path.
        vocab_size: number of tokens of the policy's tokenizer.
        device: device of the model.
        attention_name: as for `build_causal_lm`.

    Raises:
        ModelError: the path gives no such model, the tokenizer has more tokens than the model, or the model can't use
            the attention.
    """
    attention.register()
    assert settings.path is not None, "a reward model is started only with a path"
    key = "reward_model.path"
    arguments = hub_arguments(settings.path, Model(path=settings.path, revision=settings.revision), key)
    built = _load_weights(AutoModelForSequenceClassification, settings.path, key, arguments, attention_name)
    linear_head(built)
    check_vocabulary(built, vocab_size)
    return cast(PreTrainedModel, nn.Module.to(built, device))


def check_classifier(settings: RewardModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Check, without its weights, that the reward model has one label and the policy's tokenizer; return its config.

    Raises:
        ModelError: the path gives no sequence classifier with one label, or it has another tokenizer.
    """
    assert settings.path is not None, "a reward model is started only with a path"
    key = "reward_model.path"
    arguments = hub_arguments(settings.path, Model(path=settings.path, revision=settings.revision), key)
    config = _load(AutoConfig, settings.path, key, arguments)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or config.num_labels != 1:
        raise ModelError(
            f"{key} is {settings.path!r}, a {config.model_type} with {config.num_labels} labels (2 for a language "
            "model); set a sequence classifier with one label, such as a trained "
            "AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)"
        )
    check_same_tokenizer(settings.path, settings.revision, tokenizer, key=key)
    return config


def check_same_tokenizer(path: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, *, key: str) -> None:
    """Check that a model has the policy's tokenizer, or none.

    Args:
        path: path of the model.
        revision: revision of a hub model.
        tokenizer: the policy's tokenizer.
        key: configuration key of the path, for the error.

    Raises:
        ModelError: it has another tokenizer.
    """
    folder = Path(os.path.expanduser(path))
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return  # loading checks that it has enough tokens
    loaded = _load(AutoTokenizer, path, key, hub_arguments(path, Model(path=path, revision=revision), key))
    if loaded.get_vocab() != tokenizer.get_vocab():
        raise other_tokenizer_error(key, path, len(loaded), f"{len(tokenizer)} tokens")


def linear_head(classifier: PreTrainedModel) -> nn.Linear:
    """Return the linear head of a sequence classifier.

    Raises:
        ModelError: it has none, or more than one label.
    """
    heads = [module for module in classifier.children() if isinstance(module, nn.Linear)]
    if len(heads) != 1 or heads[0].out_features != 1:
        labels = [head.out_features for head in heads]
        raise ModelError(
            f"reward_model.path has a {type(classifier).__name__} with heads of {labels} labels; a reward model needs "
            "one linear head with one label"
        )
    return heads[0]


def build_meta_model(
    model: Model, *, vocab_size: int | None = None, pad_token_id: int | None = None, key: str = "model.path"
) -> PreTrainedModel:
    """Return the model on the meta device, without weights, in fp32, with the same checks as `build_causal_lm`.

    Args:
        model: the `model` section, or one with the path of another model.
        vocab_size: the tokenizer's; a new model gets it, and a loaded one must have at least as many tokens.
        pad_token_id: the tokenizer's; a new model gets it.
        key: configuration key of the path, for the error.

    Raises:
        ModelError: the path or hub name gives no config, or the config has an unknown key, is not that of a causal
            language model, or can't be built, or the tokenizer has more tokens than the model.
    """
    if model.path is None:
        config = new_config(model, vocab_size=vocab_size, pad_token_id=pad_token_id)
    else:
        config = load_config(model, key=key)
    if not model.trust_remote_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise not_causal_error(config.model_type)
    source = "model.config" if model.path is None else f"the config of {key}={model.path}"
    built = _on_meta(AutoModelForCausalLM, config, source, trust_remote_code=model.trust_remote_code)
    check_vocabulary(built, vocab_size)
    return built


def build_meta_classifier(config: PreTrainedConfig, path: str) -> PreTrainedModel:
    """Return a reward model on the meta device, without weights, in fp32.

    Args:
        config: config of the reward model, from `check_classifier`.
        path: path of the reward model, for the error.

    Raises:
        ModelError: the config can't be built.
    """
    return _on_meta(AutoModelForSequenceClassification, config, f"the config of reward_model.path={path}")


def _on_meta(kind: Any, config: PreTrainedConfig, source: str, **arguments: Any) -> PreTrainedModel:
    """Build a model without weights, in fp32, as ranks load it whatever dtype the config has, which stays as it is."""
    try:
        config = copy.deepcopy(config)  # transformers writes the dtype into it, and `rlpack serve` reads the stored one
        with torch.device("meta"):
            return kind.from_config(config, dtype=torch.float32, **arguments)
    except Exception as error:  # impossible numbers can fail anywhere in the model's code
        raise ModelError(
            f"{source} does not build a {config.model_type}: {type(error).__name__}: {error}; check heads and sizes"
        ) from error


def load_config(model: Model, *, key: str = "model.path") -> PreTrainedConfig:
    """Load the config of a model's folder or hub name.

    Raises:
        ModelError: there is none.
    """
    assert model.path is not None
    return _load(AutoConfig, model.path, key, hub_arguments(model.path, model, key))


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """Load `model.tokenizer`, or else the tokenizer of `model.path`.

    Raises:
        ModelError: neither is set, or there is no tokenizer.
    """
    name = model.tokenizer or model.path
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if name is None:
        raise ModelError("neither model.tokenizer nor model.path is set; set one to load a tokenizer")
    return _load(AutoTokenizer, name, key, hub_arguments(name, model, key))


def hub_arguments(name: str, model: Model, key: str = "model.path") -> dict[str, Any]:
    """Return the `from_pretrained` arguments for a source, after checking within seconds that it exists.

    Raises:
        ModelError: it is neither a folder nor a hub name, or it would run code without a revision.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or folder.exists():
        raise ModelError(f"{key} is {name!r}, which is not a folder; set a folder with config.json, or a hub name")
    revision = revision_of(model, key)
    if model.trust_remote_code and revision is None:
        section = key.partition(".")[0]
        raise ModelError(
            f"{section}.trust_remote_code=true would run the newest code from {name!r}; pin it with {revision_key(key)}"
        )
    arguments = {"trust_remote_code": model.trust_remote_code, "revision": revision}
    if problem := hub_model_problem(key, name, revision):
        _log.warning("the hub can't be asked for %s (%s); loading it from the local cache", name, problem)
        arguments["local_files_only"] = True
    return arguments


def _without_adapter_lookup(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, with adapter lookup offline if they are offline.

    If peft is installed, transformers looks for adapters on the hub regardless of `local_files_only`.
    """
    return arguments | ({"adapter_kwargs": {"local_files_only": True}} if arguments.get("local_files_only") else {})


def _load(kind: Any, name: str, key: str, arguments: dict[str, Any]) -> Any:
    """Call `from_pretrained`, raising every kind of failure as a `ModelError` that names the key."""
    if missing := _missing_files(kind, name):  # without files, transformers builds a tokenizer without a vocabulary
        other = ", or set model.tokenizer to a folder or hub name that has one"
        raise ModelError(
            f"{key} is {name!r}, which can't be loaded: {missing}; set a folder that has it, or a hub name"
            + other * (kind is AutoTokenizer and key == "model.path")
        )
    try:
        folder = Path(os.path.expanduser(name))
        if kind is AutoTokenizer and holds_character_tokenizer(folder):
            kind = PreTrainedTokenizerFast
        if kind is AutoTokenizer:  # mistral-common's tokenizer, for tekken.json, lacks split_special_tokens
            arguments = arguments | {"mistral_format": False}
        with UserCode("its code"):
            return kind.from_pretrained(str(folder) if folder.exists() else name, **arguments)
    except (
        *(OSError, ValueError, LookupError, ImportError, RuntimeError, StrictDataclassError),
        *(AttributeError, TypeError, AssertionError, ArithmeticError),  # for values that transformers doesn't check
        *(SafetensorError, UserCodeError),
    ) as error:
        if "trust_remote_code" in str(error):
            raise remote_code_error(key, name) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        offline = arguments.get("local_files_only") and not Path(os.path.expanduser(name)).exists()
        hint = (
            "there is no such folder, the hub can't be reached, and its cache has no such model" if offline else reason
        )
        raise ModelError(f"{key} is {name!r}, which can't be loaded: {hint}; set a folder or a hub name") from error


def _load_weights(kind: Any, name: str, key: str, arguments: dict[str, Any], attention_name: str) -> PreTrainedModel:
    """Load fp32 weights from safetensors, with an attention implementation."""
    config, source = _load(AutoConfig, name, key, arguments), f"{key} ({name!r})"
    options = _without_adapter_lookup(arguments)
    options |= {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}

    def load(implementation: str) -> PreTrainedModel:
        quantization = dequantizing_arguments(config, source)
        built, report = _load(kind, name, key, options | quantization | {"attn_implementation": implementation})
        # transformers initializes weights that the files lack at random, and only logs that.
        check_missing(report, built, name, key)
        untie_config(built, name)
        if quantization:
            to_fp32(built)
            forget_quantization(built)
        return built

    return with_attention(load, attention_name, source)


def with_attention(build: Callable[[str], PreTrainedModel], name: str, source: str) -> PreTrainedModel:
    """Call `build` with an attention implementation, with eager where a model has no sdpa; return its model.

    Args:
        build: maps the name of an implementation to a model.
        name: the implementation.
        source: where the model comes from, for the error; starts with its configuration key.

    Raises:
        ModelError: the model chooses its attention from a fixed table, which lacks ours.
    """
    try:
        return use_faster_products(build(name))
    except (ValueError, ImportError, KeyError) as error:
        if name == attention.NAME and name in str(error):
            role = source.partition(".")[0]
            batching = f"{role}.batching" if role in ("critic", "reward_model") else "batching"
            raise ModelError(
                f"{source} can't run packed rows: {_CLOSED_ATTENTION}; set {batching}.mode=dynamic or fixed"
            ) from error
        if name == own_attention.DEFAULT and ("scaled_dot_product" in str(error) or "sdpa" in str(error)):
            return use_faster_products(build(own_attention.REFERENCE))
        raise


def _missing_files(kind: Any, name: str) -> str | None:
    """Return the file that a folder lacks; None if complete or not a folder."""
    folder = Path(os.path.expanduser(name))
    needed = _TOKENIZER_FILES if kind is AutoTokenizer else _MODEL_FILES
    if not folder.is_dir() or any((folder / file).exists() for file in needed):
        return None
    return f"there is no {' or '.join(needed)} in it"

"""Load models and tokenizers from a folder or the hub, or build a new model from a config. Safetensors only."""

import difflib
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # its HTTP library depends on the version
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlpack.config.schema import Model
from rlpack.config.sections.value_models import RewardModel
from rlpack.models import attention
from rlpack.models.errors import ModelError

_log = logging.getLogger(__name__)

# Long enough for a slow link, short enough that a wrong name fails soon when offline.
HUB_TIMEOUT_S = 5.0

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
) -> PreTrainedModel:
    """Load a causal language model, or build a new one; weights are fp32.

    Args:
        model: the `model` section: a path to load from, or `model.config` of a new model.
        vocab_size: the tokenizer's. A new model gets it; a loaded one must have at least as many tokens.
        eos_token_id: the tokenizer's, written into a new model's config.
        pad_token_id: the tokenizer's, likewise.
        seed: of a new model's weights; the process's random state does not change.
        device: of the model.
        attention_name: transformers' attention implementation; "sdpa" for a model that generates with a cache.

    Raises:
        ModelError: the path or hub name gives no model, the config has an unknown key or model type, the tokenizer has
            more tokens than the model, or remote code is requested without a revision.
    """
    attention.register()
    if model.path is None:
        ids = {"vocab_size": vocab_size, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        config = _new_config(model.config, {name: value for name, value in ids.items() if value is not None})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = AutoModelForCausalLM.from_config(config, attn_implementation=attention_name, dtype=torch.float32)
    else:
        if model.config:
            raise ModelError(
                f"model.path={model.path} and model.config ({', '.join(model.config)}) are both set; a loaded model "
                "has its own config, so set only one of them"
            )
        arguments = _without_adapter_lookup(_hub_arguments(model.path, model))
        options = {"attn_implementation": attention_name, "dtype": torch.float32, "use_safetensors": True}
        built = _load(AutoModelForCausalLM, model.path, "model.path", arguments | options)
    _check_vocabulary(built, vocab_size)
    return built.to(device)


def load_classifier(settings: RewardModel, *, vocab_size: int, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load a sequence classifier with one label; weights are fp32.

    Args:
        settings: the `reward_model` section, with a path.
        vocab_size: of the policy's tokenizer.
        device: of the model.

    Raises:
        ModelError: the path gives no such model, or the tokenizer has more tokens than the model.
    """
    attention.register()
    assert settings.path is not None, "a reward model is started only with a path"
    key = "reward_model.path"
    arguments = _hub_arguments(settings.path, Model(path=settings.path, revision=settings.revision), key)
    options = {"attn_implementation": attention.NAME, "dtype": torch.float32, "use_safetensors": True}
    built = _load(AutoModelForSequenceClassification, settings.path, key, _without_adapter_lookup(arguments) | options)
    linear_head(built)
    _check_vocabulary(built, vocab_size)
    return built.to(device)


def check_classifier(settings: RewardModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check, without its weights, that the reward model has one label and the policy's tokenizer.

    Raises:
        ModelError: the path gives no sequence classifier with one label, or it has another tokenizer.
    """
    assert settings.path is not None, "a reward model is started only with a path"
    key = "reward_model.path"
    arguments = _hub_arguments(settings.path, Model(path=settings.path, revision=settings.revision), key)
    config = _load(AutoConfig, settings.path, key, arguments)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or config.num_labels != 1:
        raise ModelError(
            f"{key} is {settings.path!r}, a {config.model_type} with {config.num_labels} labels (2 for a language "
            "model); set a sequence classifier with one label, such as a trained "
            "AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)"
        )
    way_out = "write a role that tokenizes texts itself (roles.<name>.target), or set another model"
    check_same_tokenizer(settings.path, settings.revision, tokenizer, key=key, way_out=way_out)


def check_same_tokenizer(
    path: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, *, key: str, way_out: str
) -> None:
    """Check that a model has the policy's tokenizer, or none.

    Args:
        path: of the model.
        revision: of a hub model.
        tokenizer: the policy's.
        key: configuration key of the path, for the error.
        way_out: what to change, for the error.

    Raises:
        ModelError: it has another tokenizer.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return  # loading checks that it has enough tokens
    loaded = _load(AutoTokenizer, path, key, _hub_arguments(path, Model(path=path, revision=revision), key))
    if loaded.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"{key} is {path!r}, whose tokenizer has {len(loaded)} tokens and differs from the policy's, of "
            f"{len(tokenizer)}; the model reads the policy's tokens: {way_out}"
        )


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


def build_meta_model(model: Model, *, vocab_size: int | None = None, key: str = "model.path") -> PreTrainedModel:
    """Return the model on the meta device, without weights, with the same checks as `build_causal_lm`.

    Args:
        model: the `model` section, or one with the path of another model.
        vocab_size: the tokenizer's; a new model gets it.
        key: configuration key of the path, for the error.

    Raises:
        ModelError: the path or hub name gives no config, or the config has an unknown key, is not that of a causal
            language model, or can't be built.
    """
    if model.path is None:
        config = _new_config(model.config, {} if vocab_size is None else {"vocab_size": vocab_size})
    else:
        config = _load(AutoConfig, model.path, key, _hub_arguments(model.path, model, key))
    if not model.trust_remote_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"the model is a {config.model_type}, which is not a causal language model; choose another")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # impossible numbers can fail anywhere in the model's code
        source = "model.config" if model.path is None else f"the config of {key}={model.path}"
        raise ModelError(
            f"{source} does not build a {config.model_type}: {type(error).__name__}: {error}; check heads and sizes"
        ) from error


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """Load `model.tokenizer`, or else the tokenizer of `model.path`.

    Raises:
        ModelError: neither is set, or there is no tokenizer.
    """
    name = model.tokenizer or model.path
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if name is None:
        raise ModelError("neither model.tokenizer nor model.path is set; set one to load a tokenizer")
    return _load(AutoTokenizer, name, key, _hub_arguments(name, model, key))


def _new_config(settings: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    """Build a new model's config; transformers itself would ignore a misspelt key."""
    settings = dict(settings)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise ModelError("model.path is null and model.config has no model_type; set one of them")
    if kind not in CONFIG_MAPPING:
        near = ", ".join(difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), n=3)) or "qwen3, llama, mistral"
        raise ModelError(f"model.config.model_type is {kind!r}, which transformers does not know; try {near}")
    known = set(AutoConfig.for_model(kind).to_dict())
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else f"; its settings are {', '.join(sorted(known))}"
            raise ModelError(f"model.config.{key} is not a setting of {kind}{hint}")
    try:
        return AutoConfig.for_model(kind, **(settings | ids))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(f"model.config is not a valid {kind} config: {error}") from error


def _hub_arguments(name: str, model: Model, key: str = "model.path") -> dict[str, Any]:
    """Return the `from_pretrained` arguments for a source, after checking within seconds that it exists."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or folder.exists():
        raise ModelError(f"{key} is {name!r}, which is not a folder; set a folder with config.json, or a hub name")
    if model.trust_remote_code and model.revision is None:
        raise ModelError(
            f"model.trust_remote_code=true would run the newest code from {name!r}; pin it with model.revision"
        )
    arguments = {"trust_remote_code": model.trust_remote_code, "revision": model.revision}
    try:
        HfApi().model_info(name, revision=model.revision, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{key} is {name!r}: the hub has no such model, or you have no access (revision "
            f"{model.revision or 'main'}); check the name and {key.partition('.')[0]}.revision, or log in"
        ) from error
    except (OfflineModeIsEnabled, HTTPError, OSError) as error:
        _log.warning("the hub can't be reached (%s); loading %s from the local cache", type(error).__name__, name)
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
        raise ModelError(
            f"{key} is {name!r}, which can't be loaded: {missing}; set a folder that has it, or a hub name"
        )
    try:
        folder = Path(name).expanduser()
        return kind.from_pretrained(str(folder) if folder.exists() else name, **arguments)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        offline = arguments.get("local_files_only") and not Path(name).expanduser().exists()
        hint = (
            "there is no such folder, the hub can't be reached, and its cache has no such model" if offline else reason
        )
        raise ModelError(f"{key} is {name!r}, which can't be loaded: {hint}; set a folder or a hub name") from error


def _missing_files(kind: Any, name: str) -> str | None:
    """Return the file that a folder lacks; None if complete or not a folder."""
    folder = Path(name).expanduser()
    needed = _TOKENIZER_FILES if kind is AutoTokenizer else _MODEL_FILES
    if not folder.is_dir() or any((folder / file).exists() for file in needed):
        return None
    return f"there is no {' or '.join(needed)} in it"


def _check_vocabulary(model: PreTrainedModel, vocab_size: int | None) -> None:
    """Raise if the tokenizer has more tokens than the model."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    known = embeddings.num_embeddings
    if vocab_size is not None and vocab_size > known:
        raise ModelError(
            f"the tokenizer has {vocab_size} tokens and the model {known}; set model.tokenizer to the model's own"
        )

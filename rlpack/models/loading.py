"""Models and tokenizers: from a folder, from the hub, or a new model from a config. Safetensors only."""

import difflib
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of whichever HTTP library this version is built on
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

# Long enough for a slow link, short enough that a name typed while offline fails while one looks.
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
    """Load a causal language model, or make a new one; weights are fp32.

    Args:
        model: the `model` section. With a path, weights come from there; without, `model.config` describes a new one.
        vocab_size: the tokenizer's; a new model gets it, a loaded one has to have at least as many.
        eos_token_id: the tokenizer's end of sequence, written into a new model's config.
        pad_token_id: the tokenizer's padding, likewise.
        seed: of a new model's weights; the process's own random state is left alone.
        device: where the model goes.
        attention_name: transformers' attention implementation; "sdpa" for a model that generates with a cache.

    Raises:
        ModelError: the path or hub name gives no model, the config has an unknown key or kind, the tokenizer has more
            tokens than the model, or remote code is asked for without a revision.
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
                "has its own config, so leave one of them out"
            )
        arguments = _alone(_hub_arguments(model.path, model))
        options = {"attn_implementation": attention_name, "dtype": torch.float32, "use_safetensors": True}
        built = _load(AutoModelForCausalLM, model.path, "model.path", arguments | options)
    _check_vocabulary(built, vocab_size)
    return built.to(device)


def load_classifier(settings: RewardModel, *, vocab_size: int, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load a sequence classifier with one label; weights are fp32.

    Args:
        settings: with a path.
        vocab_size: of the tokenizer whose ids it will read.
        device: where the model goes.

    Raises:
        ModelError: the path gives no such model, or the tokenizer has more tokens than it.
    """
    attention.register()
    assert settings.path is not None, "a reward model is started with a path alone"
    key = "reward_model.path"
    arguments = _hub_arguments(settings.path, Model(path=settings.path, revision=settings.revision), key)
    options = {"attn_implementation": attention.NAME, "dtype": torch.float32, "use_safetensors": True}
    built = _load(AutoModelForSequenceClassification, settings.path, key, _alone(arguments) | options)
    linear_head(built)
    _check_vocabulary(built, vocab_size)
    return built.to(device)


def check_classifier(settings: RewardModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """See before anything starts that `load_classifier` will find a model of rewards that reads the policy's tokens.

    Raises:
        ModelError: the path gives no sequence classifier of one label, or it has a tokenizer of its own.
    """
    assert settings.path is not None, "a reward model is started with a path alone"
    key = "reward_model.path"
    arguments = _hub_arguments(settings.path, Model(path=settings.path, revision=settings.revision), key)
    config = _load(AutoConfig, settings.path, key, arguments)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or config.num_labels != 1:
        raise ModelError(
            f"{key} is {settings.path!r}, a {config.model_type} of {config.num_labels} labels (2 if it is a language "
            "model); give a sequence classifier with one label, as "
            "AutoModelForSequenceClassification.from_pretrained(path, num_labels=1) makes one to be trained"
        )
    way_out = "write a role that tokenises texts anew (roles.<name>.target), or take another model"
    check_same_tokens(settings.path, settings.revision, tokenizer, key=key, way_out=way_out)


def check_same_tokens(
    path: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, *, key: str, way_out: str
) -> None:
    """See that a model which is given the policy's tokens reads no others; a folder without a tokenizer will do.

    Args:
        path: of the model.
        revision: of a hub model.
        tokenizer: the policy's.
        key: that holds the path, for messages.
        way_out: likewise.

    Raises:
        ModelError: it has another tokenizer.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return  # whether it has as many tokens is seen when it is loaded
    own = _load(AutoTokenizer, path, key, _hub_arguments(path, Model(path=path, revision=revision), key))
    if own.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"{key} is {path!r}, whose tokenizer has {len(own)} tokens and is not the policy's, of {len(tokenizer)}; "
            f"the model is given the policy's own tokens: {way_out}"
        )


def linear_head(classifier: PreTrainedModel) -> nn.Linear:
    """Return the head of a sequence classifier.

    Raises:
        ModelError: it has none, or more than one label.
    """
    heads = [module for module in classifier.children() if isinstance(module, nn.Linear)]
    if len(heads) != 1 or heads[0].out_features != 1:
        labels = [head.out_features for head in heads]
        raise ModelError(
            f"reward_model.path holds a {type(classifier).__name__} with heads of {labels} labels; a model of rewards "
            "has one linear head of one label"
        )
    return heads[0]


def outline(model: Model, *, vocab_size: int | None = None, key: str = "model.path") -> PreTrainedModel:
    """Return the model on the meta device, without weights: what `build_causal_lm` would raise about it is raised now.

    Args:
        model: the `model` section, or one with the path of another model.
        vocab_size: the tokenizer's; a new model gets it.
        key: that holds the path, for messages.

    Raises:
        ModelError: the path or hub name gives no config, the config has an unknown key, is of no language model, or
            can't be built.
    """
    if model.path is None:
        config = _new_config(model.config, {} if vocab_size is None else {"vocab_size": vocab_size})
    else:
        config = _load(AutoConfig, model.path, key, _hub_arguments(model.path, model, key))
    if not model.trust_remote_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"the model is a {config.model_type}, which is no causal language model; choose another")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # a config of impossible numbers fails in whatever line meets them first
        source = "model.config" if model.path is None else f"the config of {key}={model.path}"
        raise ModelError(
            f"{source} makes no {config.model_type}: {type(error).__name__}: {error}; check its numbers (heads, sizes)"
        ) from error


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """Load `model.tokenizer`, or the one that lies beside the weights of `model.path`.

    Raises:
        ModelError: neither is set, or there is no tokenizer.
    """
    name = model.tokenizer or model.path
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if name is None:
        raise ModelError("neither model.tokenizer nor model.path is set; set one to load a tokenizer")
    return _load(AutoTokenizer, name, key, _hub_arguments(name, model, key))


def _new_config(settings: dict[str, Any], ids: dict[str, int]) -> PreTrainedConfig:
    """Build a new model's config; transformers itself would swallow a misspelt key."""
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
            hint = f"; did you mean {', '.join(near)}?" if near else f"; it knows {', '.join(sorted(known))}"
            raise ModelError(f"model.config.{key} is not a setting of {kind}{hint}")
    try:
        return AutoConfig.for_model(kind, **(settings | ids))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(f"model.config does not make a {kind}: {error}") from error


def _hub_arguments(name: str, model: Model, key: str = "model.path") -> dict[str, Any]:
    """Return what `from_pretrained` needs to know of the source; say within seconds if it can't be reached."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or folder.exists():
        raise ModelError(f"{key} is {name!r}, which is not a folder; give a folder with config.json, or a hub name")
    if model.trust_remote_code and model.revision is None:
        raise ModelError(
            f"model.trust_remote_code=true would run code from {name!r} as it is today; pin it by model.revision"
        )
    arguments = {"trust_remote_code": model.trust_remote_code, "revision": model.revision}
    try:
        HfApi().model_info(name, revision=model.revision, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{key} is {name!r}: the hub has no such model for you (revision {model.revision or 'main'}); check the "
            f"name and {key.partition('.')[0]}.revision, or log in"
        ) from error
    except (OfflineModeIsEnabled, HTTPError, OSError) as error:
        _log.warning("the hub can't be reached (%s); %s is taken from the local cache", type(error).__name__, name)
        arguments["local_files_only"] = True
    return arguments


def _alone(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that keep a model's loading off the network where the rest of them does.

    Where peft is installed, transformers looks for adapters by itself, and would not know.
    """
    return arguments | ({"adapter_kwargs": {"local_files_only": True}} if arguments.get("local_files_only") else {})


def _load(kind: Any, name: str, key: str, arguments: dict[str, Any]) -> Any:
    """Call `from_pretrained`, with its many kinds of failure turned into one that names the key."""
    if missing := _missing(kind, name):  # from no file at all transformers makes a tokenizer without a vocabulary
        raise ModelError(
            f"{key} is {name!r}, which can't be loaded: {missing}; give a folder that has it, or a hub name"
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
        raise ModelError(f"{key} is {name!r}, which can't be loaded: {hint}; give a folder or a hub name") from error


def _missing(kind: Any, name: str) -> str | None:
    """Return which file a folder lacks that a model or tokenizer needs, None where it lacks none or is no folder."""
    folder = Path(name).expanduser()
    needed = _TOKENIZER_FILES if kind is AutoTokenizer else _MODEL_FILES
    if not folder.is_dir() or any((folder / file).exists() for file in needed):
        return None
    return f"there is no {' or '.join(needed)} in it"


def _check_vocabulary(model: PreTrainedModel, vocab_size: int | None) -> None:
    """Raise if the tokenizer has ids that the model does not know."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    known = embeddings.num_embeddings
    if vocab_size is not None and vocab_size > known:
        raise ModelError(
            f"the tokenizer has {vocab_size} tokens and the model {known}; set model.tokenizer to the model's own"
        )

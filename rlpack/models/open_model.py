"""Open models to build them in parts: on the meta device, with the source of each rank's part of the weights."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import _get_resolved_checkpoint_files
from transformers.models.auto.auto_factory import _get_model_class

from rlpack.config.schema import Model
from rlpack.config.sections.value_models import RewardModel
from rlpack.models import attention
from rlpack.models.errors import ModelError
from rlpack.models.loading import hub_arguments, linear_head, load_config, with_attention
from rlpack.models.new_config import new_config
from rlpack.models.new_model import NewModel
from rlpack.models.stored_model import NotInPartsError, StoredModel
from rlpack.models.vocabulary import check_vocabulary

_OWN_CODE = "model.trust_remote_code=true: custom code may load weights in its own way"


def open_causal_lm(
    model: Model, *, vocab_size: int | None = None, attention_name: str = attention.NAME, key: str = "model.path"
) -> StoredModel:
    """Open a causal language model; `build_causal_lm` loads the same model whole.

    Args:
        model: the `model` section, with a path.
        vocab_size: the tokenizer's; the model must have at least as many tokens.
        attention_name: as for `build_causal_lm`.
        key: configuration key of the path, for errors.

    Raises:
        ModelError: as `build_causal_lm`.
        NotInPartsError: it can only be loaded whole; the message says why.
    """
    opened = _open(MODEL_FOR_CAUSAL_LM_MAPPING, model, key, attention_name)
    check_vocabulary(opened.model, vocab_size)
    return opened


def open_new_causal_lm(
    model: Model,
    *,
    vocab_size: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
    attention_name: str = attention.NAME,
) -> NewModel:
    """Open a new causal language model; `build_causal_lm` builds the same model whole.

    Args:
        model: the `model` section, with `model.config`.
        vocab_size: the tokenizer's.
        eos_token_id: the tokenizer's.
        pad_token_id: the tokenizer's.
        seed: random seed for the weights.
        attention_name: as for `build_causal_lm`.

    Raises:
        ModelError: as `build_causal_lm`.
        NotInPartsError: it can only be built whole; the message says why.
    """
    config = new_config(model, vocab_size=vocab_size, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    try:
        opened = NewModel.open(config, attention_name, seed, f"model.config ({config.model_type})")
    except (ModelError, NotInPartsError):
        raise
    except Exception as error:
        raise NotInPartsError(f"{type(error).__name__}: {error}") from error
    check_vocabulary(opened.model, vocab_size)
    return opened


def open_classifier(settings: RewardModel, *, vocab_size: int, attention_name: str = attention.NAME) -> StoredModel:
    """Open a sequence classifier with one label; `load_classifier` loads the same model whole.

    Args:
        settings: the `reward_model` section, with a path.
        vocab_size: number of tokens of the policy's tokenizer.
        attention_name: as for `build_causal_lm`.

    Raises:
        ModelError: as `load_classifier`.
        NotInPartsError: it can only be loaded whole; the message says why.
    """
    model = Model(path=settings.path, revision=settings.revision)
    opened = _open(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, model, "reward_model.path", attention_name)
    linear_head(opened.model)
    check_vocabulary(opened.model, vocab_size)
    return opened


def check_in_parts(model: Model, *, key: str = "model.path", classifier: bool = False) -> None:
    """Raise if a model's config alone says that it can only be loaded whole; its weight files aren't needed.

    Args:
        model: with a path.
        key: configuration key of the path.
        classifier: whether it is a sequence classifier.

    Raises:
        NotInPartsError: it can only be loaded whole; the message says why.
    """
    if model.trust_remote_code:
        raise NotInPartsError(_OWN_CODE)
    config = load_config(model, key=key)
    classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if classifier else MODEL_FOR_CAUSAL_LM_MAPPING
    if (reason := _why_whole(_get_model_class(config, cast(Any, classes)), config)) is not None:
        raise NotInPartsError(reason)


def weight_paths(source: str, arguments: Mapping[str, Any]) -> list[Path]:
    """Return the safetensors files that `from_pretrained` would load, after downloading them if necessary.

    Args:
        source: a folder, or a hub name.
        arguments: those of `hub_arguments`.

    Raises:
        OSError: there are no such files.
    """
    download = {name: value for name, value in arguments.items() if name != "trust_remote_code"}
    paths, _ = _get_resolved_checkpoint_files(
        source,
        variant=None,
        gguf_file=None,
        use_safetensors=True,
        user_agent=None,
        is_remote_code=False,
        download_kwargs=download,  # pyright: ignore[reportArgumentType]
    )
    return [Path(path) for path in paths or []]


def _why_whole(kind: Any, config: PreTrainedConfig) -> str | None:
    """Return why a model of a class can only be loaded whole, by its config."""
    if kind.config_class is not type(config) or kind.is_remote_code():
        return f"{kind.__name__} isn't the class of a {config.model_type}"
    settings = config.to_dict()
    for setting in ("quantization_config", "fusion_config", "transformers_weights"):
        if settings.get(setting) is not None:
            return f"its config has {setting}"
    if "extra_files" in dir(config) and type(config).extra_files:  # transformers before 5.20 has no such attribute
        return "it has further weight files"
    return None


def _open(classes: Any, model: Model, key: str, attention_name: str) -> StoredModel:
    """Open the model of `model.path` with its class in a table of transformers.

    Other failures become a `NotInPartsError`: the loader that reads whole models then reports them.
    """
    if model.path is None:
        raise NotInPartsError("its weights are new")
    if model.trust_remote_code:
        raise NotInPartsError(_OWN_CODE)
    attention.register()
    arguments = hub_arguments(model.path, model, key)
    config = load_config(model, key=key)
    opened: list[StoredModel] = []

    def build(name: str) -> PreTrainedModel:
        opened.append(_open_files(classes, config, str(model.path), key, arguments, name))
        return opened[-1].model

    try:
        with_attention(build, attention_name, f"{key} ({model.path!r})")
    except (ModelError, NotInPartsError):
        raise
    except Exception as error:
        raise NotInPartsError(f"{type(error).__name__}: {error}") from error
    return opened[-1]


def _open_files(
    classes: Any, config: PreTrainedConfig, name: str, key: str, arguments: dict[str, Any], attention_name: str
) -> StoredModel:
    """Open the files that `from_pretrained` would load, with one attention implementation."""
    kind = _get_model_class(config, classes)
    if (reason := _why_whole(kind, config)) is not None:
        raise NotInPartsError(reason)
    folder = Path(os.path.expanduser(name))
    source = str(folder) if folder.exists() else name
    download = {name: value for name, value in arguments.items() if name != "trust_remote_code"}
    paths = weight_paths(source, arguments)
    opened = StoredModel.open(kind, config, paths, source=name, key=key, attn_implementation=attention_name)
    opened.model.config.name_or_path = source
    opened.model.name_or_path = source
    if opened.model.can_generate():
        adjust: Any = opened.model.adjust_generation_fn
        adjust(
            *(None, True, None, source),
            cache_dir=None,
            force_download=False,
            proxies=None,
            token=None,
            subfolder="",
            **{"local_files_only": False, "revision": None} | download,
            trust_remote_code=False,
        )
    return opened

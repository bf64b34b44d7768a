"""Build the config of a new model."""

import inspect
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from rlpack.config.schema import Model
from rlpack.models.errors import ModelError, unknown_setting_error, unknown_type_error
from rlpack.models.head_dim import HEAD_DIM, reads_head_dim

# In some models, the number of outputs. The default is that of a published model.
_OUTPUTS = "unpadded_vocab_size"


def new_config(model: Model, **ids: int | None) -> PreTrainedConfig:
    """Build the config of a new model; transformers itself would ignore a misspelt key.

    Args:
        model: the `model` section, without a path.
        ids: settings from the tokenizer, such as the number of tokens and ids of special ones; None leaves the setting
            unchanged.

    Raises:
        ModelError: the config has an unknown key or model type, or a value that its type rejects.
    """
    settings, known_ids = dict(model.config), {name: value for name, value in ids.items() if value is not None}
    kind = settings.pop("model_type", None)
    if kind is None:
        raise ModelError("model.path is null and model.config has no model_type; set one of them")
    if kind not in CONFIG_MAPPING:
        raise unknown_type_error(kind, CONFIG_MAPPING)
    default = AutoConfig.for_model(kind)
    known = {*default.to_dict(), *default.attribute_map}  # also common names, such as num_experts of qwen3_moe
    if HEAD_DIM in settings and reads_head_dim(_modeling_file(default)):
        known.add(HEAD_DIM)
    for key in settings:
        if key not in known:
            raise unknown_setting_error(kind, key, known)
    if _OUTPUTS in known and "vocab_size" in known_ids:
        settings.setdefault(_OUTPUTS, known_ids["vocab_size"])
    try:
        return AutoConfig.for_model(kind, **settings | known_ids)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(f"model.config is not a valid {kind} config: {error}") from error


def _modeling_file(config: PreTrainedConfig) -> Path:
    """Return the file of the model's code, next to that of its config."""
    path = Path(inspect.getfile(type(config)))
    return path.with_name(path.name.replace("configuration_", "modeling_", 1))

"""Models whose files hold quantized weights: they are loaded in fp32, and saved without quantization.

transformers reads the weights of two methods as numbers, FP8 with scales of blocks and MXFP4. Its other methods keep
them quantized, so they can't be trained.
"""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoQuantizationConfig

from rlpack.models.errors import ModelError

_SETTING = "quantization_config"
_METHODS = ("fp8", "mxfp4")


def quantization_method(config: PreTrainedConfig) -> str | None:
    """Return the method by which a model's files are quantized; None if they aren't."""
    settings = _settings(config)
    return None if settings is None else str(settings.get("quant_method") or "bitsandbytes")


def check_quantization(config: PreTrainedConfig, source: str) -> None:
    """Raise if a model's weights are quantized by a method that keeps them quantized.

    Args:
        config: the model's.
        source: key and path of the model, for the error.

    Raises:
        ModelError: names the method, and those that can be loaded.
    """
    method = quantization_method(config)
    if method is not None and method not in _METHODS:
        raise ModelError(
            f"{source} has weights that are quantized by {method} ({_SETTING}), which can't be loaded in fp32; set a "
            f"model whose weights aren't quantized, or are by {' or '.join(_METHODS)}"
        )


def dequantizing_arguments(config: PreTrainedConfig, source: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` with which it loads a model's weights in fp32, on any device.

    By default, it keeps the weights quantized on GPUs that can compute with them.

    Args:
        config: the model's.
        source: as for `check_quantization`.

    Raises:
        ModelError: as for `check_quantization`.
    """
    check_quantization(config, source)
    if (settings := _settings(config)) is None:
        return {}
    return {_SETTING: AutoQuantizationConfig.from_dict(settings | {"dequantize": True})}


def to_fp32(model: PreTrainedModel) -> None:
    """Convert a dequantized model's weights to fp32.

    Older versions of transformers (5.19, not 5.23) dequantize MXFP4 to bf16, whatever dtype they are given. This rounds
    nothing, because bf16 has all numbers that MXFP4 stands for.
    """
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.float()


def forget_quantization(model: PreTrainedModel) -> None:
    """Have transformers save a model that was loaded in fp32 as one that was never quantized.

    Otherwise it would quantize the weights again, or write them under the names of quantized ones.
    """
    # Without the conversions of the files, it takes those of the architecture.
    vars(model).pop("_weight_conversions", None)
    for config in (model.config, model.config.get_text_config()):
        vars(config).pop(_SETTING, None)


def _settings(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the settings of the quantization, which transformers also looks for in the text model's config."""
    for one in (config, config.get_text_config()):
        if (settings := one.to_dict().get(_SETTING)) is not None:
            return dict(settings)
    return None

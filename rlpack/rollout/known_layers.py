"""Recognize decoders of the Llama shape, whose layers can be run without their modules.

The families are Llama, Mistral, Qwen2, Qwen3 and Gemma 3. A model is recognized only if every module has exactly the
class that transformers gives it, or rlpack's linear layer, and nothing has been attached to it: adapters, quantized or
parametrized layers, hooks and replaced `forward` methods all make it unknown.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from rlpack.models.cpu_products import FasterLinear
from rlpack.models.rope import frequency_limits

# Class prefixes by model type; the classes are those of `transformers.models.<type>.modeling_<type>`.
_FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma3",
}
_MODULES = {"gemma3_text": "gemma3"}
_SUFFIXES = (
    *("ForCausalLM", "Model", "TextModel", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding"),
    "TextScaledWordEmbedding",
)
_PLAIN = (nn.Linear, FasterLinear, nn.Embedding, nn.ModuleList)
# Names in configs for the functions that these activations compute.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
# Settings that would change attention or logits in ways that are not implemented.
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_LAYER_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


class Norm(NamedTuple):
    """An RMS norm: x / sqrt(mean(x²) + eps) · weight.

    Attributes:
        weight: [..., n]; a copy if the module adds 1 to it.
        eps: see above; a scalar.
    """

    weight: Tensor
    eps: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """Normalize the last axis, in two thirds of the time of `F.rms_norm` on CPUs."""
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        factor = torch.addcmul(self.eps, size, size, value=1 / states.shape[-1]).rsqrt_()
        return torch.mul(states, factor).mul_(self.weight)


class KnownLayer(NamedTuple):
    """A layer: states += after_attention(o(attention(qkv(before_attention(states))))); the same for the MLP.

    Attributes:
        kind: kind of its attention and rotary positions, as in the config's `layer_types`.
        before_attention: norm of the layer's input.
        after_attention: norm of attention's output; None without.
        before_mlp: norm of the MLP's input.
        after_mlp: norm of the MLP's output; None without.
        q_norm: norm of each query head; None without.
        k_norm: norm of each key head; None without.
        qkv: layers that read the attention's input.
        output: the layer after attention.
        gate_up: layers that read the MLP's input.
        down: the last layer of the MLP.
        scaling: factor of the products of queries and keys.
    """

    kind: str
    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
    after_mlp: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    output: nn.Linear
    gate_up: tuple[nn.Linear, nn.Linear]
    down: nn.Linear
    scaling: float


class KnownModel(NamedTuple):
    """The parts of a recognized model; tensors are the model's own unless stated otherwise.

    Attributes:
        embedding: [V, hidden size].
        embedding_scale: factor applied to embeddings.
        layers: the layers in order.
        norm: norm of the last layer's output.
        head: returns logits.
        heads: number of query heads.
        key_value_heads: number of key and value heads.
        head_size: entries of a head.
        activation: activation function of the MLP.
        rotate: returns (cos, sin), each [1, n, head_size], of positions int64 [1, n] and a kind of layer.
    """

    embedding: Tensor
    embedding_scale: float
    layers: tuple[KnownLayer, ...]
    norm: Norm
    head: nn.Linear
    heads: int
    key_value_heads: int
    head_size: int
    activation: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, str], tuple[Tensor, Tensor]]


def unknown_part(model: PreTrainedModel) -> str | None:
    """Return why `read_known` can't read a model, or None if it can."""
    if model.config.model_type not in _FAMILIES:
        return f"models of type {model.config.model_type} are not among {', '.join(_FAMILIES)}"
    return _unknown_setting(model) or _unknown_module(model) or _unknown_weight(model)


def read_known(model: PreTrainedModel) -> KnownModel:
    """Return the parts of a model for which `unknown_part` is None."""
    base: Any = model.get_submodule("model")
    head: Any = model.get_submodule("lm_head")
    config: Any = model.config
    is_gemma = config.model_type == "gemma3_text"
    kinds = _layer_kinds(model)
    layers = tuple(_layer(layer, kind, is_gemma) for layer, kind in zip(base.layers, kinds, strict=True))
    rotary = base.rotary_emb

    def rotate(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        arguments = (kind,) if is_gemma else ()
        return rotary(base.embed_tokens.weight, positions, *arguments)

    return KnownModel(
        embedding=base.embed_tokens.weight,
        embedding_scale=float(base.embed_tokens.embed_scale) if is_gemma else 1.0,
        layers=layers,
        norm=_norm(base.norm),
        head=head,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_size=base.layers[0].self_attn.head_dim,
        activation=_ACTIVATIONS[_activation_name(model)],
        rotate=rotate,
    )


def _unknown_setting(model: PreTrainedModel) -> str | None:
    """Describe a setting that is not implemented here."""
    settings = model.config.to_dict()
    if changed := [name for name in _UNSUPPORTED if settings.get(name)]:
        return f"its config sets {', '.join(changed)}"
    if _activation_name(model) not in _ACTIVATIONS:
        return f"its activation is {_activation_name(model)}"
    if list(frequency_limits(model.config)):
        return "its rotary frequencies depend on the length of rows"
    return None


def _unknown_module(model: PreTrainedModel) -> str | None:
    """Describe a module whose forward pass may differ from that of its family."""
    kind = model.config.model_type
    stem = _MODULES.get(kind, kind)
    own = {f"{_FAMILIES[kind]}{suffix}" for suffix in _SUFFIXES}
    plain = (*_PLAIN, type(ACT2FN[_activation_name(model)]))
    for name, module in model.named_modules():
        cls = type(module)
        is_own = cls.__module__ == f"transformers.models.{stem}.modeling_{stem}" and cls.__name__ in own
        if not is_own and cls not in plain:
            return f"{name or 'the model'} is a {cls.__module__}.{cls.__name__}"
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has hooks or another forward method"
    return None


def _unknown_weight(model: PreTrainedModel) -> str | None:
    """Describe a parameter that is not a plain fp32 tensor on the model's device."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.dtype != torch.float32:
            return f"{name} is a {type(parameter).__name__} of {parameter.dtype}"
        if parameter.device != model.device:
            return f"{name} is on {parameter.device}, other weights on {model.device}"
    return None


def _activation_name(model: PreTrainedModel) -> str:
    settings = model.config.to_dict()
    return str(settings.get("hidden_activation") or settings.get("hidden_act"))


def _layer_kinds(model: PreTrainedModel) -> list[str]:
    """Return each layer's kind; a model that doesn't name them has one kind for all."""
    config: Any = model.config
    return config.to_dict().get("layer_types") or ["full_attention"] * config.num_hidden_layers


def _layer(layer: Any, kind: str, is_gemma: bool) -> KnownLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [_norm(layer.get_submodule(name)) for name in (_GEMMA_NORMS if is_gemma else _LAYER_NORMS)]
    before_attention, after_attention, before_mlp, after_mlp = norms if is_gemma else (norms[0], None, norms[1], None)
    names = {name for name, _ in attention.named_children()}
    return KnownLayer(
        kind=kind,
        before_attention=before_attention,
        after_attention=after_attention,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        q_norm=_norm(attention.q_norm) if "q_norm" in names else None,
        k_norm=_norm(attention.k_norm) if "k_norm" in names else None,
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        output=attention.o_proj,
        gate_up=(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        scaling=attention.scaling,
    )


def _norm(module: Any) -> Norm:
    """Return a norm of either convention: Gemma's weights are relative to 1."""
    if type(module).__name__.startswith("Gemma"):
        return Norm(1 + module.weight, module.weight.new_tensor(module.eps))
    return Norm(module.weight, module.weight.new_tensor(module.variance_epsilon))

"""Check what a model's architecture rules out, without its weights.

Ranks compare outputs with transformers' own as they start (`rlpack.models.checks`). What can be known without weights
is refused here, before any process starts. Small models of architectures that `benchmarks.families` has not validated
are also compared here, with random weights.
"""

import copy
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rlpack.config.layout_remedies import Change, overrides, remedy
from rlpack.config.recipes import recipe_of
from rlpack.config.roles import (
    batching_key,
    gpus_per_rank,
    longest_rollout,
    pool_of,
    role_batching,
    role_compute,
    role_parallel,
    runs_packed,
    started_roles,
)
from rlpack.config.schema import Config
from rlpack.config.sections.optimization import Experts
from rlpack.models import attention, own_attention
from rlpack.models.check_rows import RowLimits
from rlpack.models.checks import check_model
from rlpack.models.errors import ModelError
from rlpack.models.expert_parallel import expert_modules
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.loading import with_attention
from rlpack.models.packed import language_model
from rlpack.models.parallel import decoder_layers
from rlpack.models.policy import Policy, output_head
from rlpack.models.quantized import check_quantization, quantization_method
from rlpack.models.rope import check_positions, check_row_length
from rlpack.models.router_choice import check_routers
from rlpack.models.text_settings import settings_of
from rlpack.models.verified import is_verified
from rlpack.models.vocabulary import check_vocabulary
from rlpack.recipes.preflight.split_checks import split_sizes_problem
from rlpack.rollout.vllm.architectures import architecture_problem
from rlpack.rollout.vllm.arguments import (
    Shape,
    engine_length,
    length_limit,
    run_cache_problem,
    run_capacity,
    shape_problem,
    split_problem,
)

# A model of this size is built and compared within seconds.
_MAX_WEIGHTS = 50_000_000
# Axes of a weight that stacks experts, and the settings that give its sizes.
_STACKED, _EXPERT_SIZES = 3, ("moe_intermediate_size", "hidden_size", "intermediate_size")
# The section of a model that has no path, for errors.
_NEW_MODEL = "model.config"
# Standard deviation of the noise on the weights of a model that is compared.
_NOISE = 0.1


def check_architecture(config: Config, model: PreTrainedModel) -> None:
    """Raise if the policy's architecture can't be trained as configured.

    Args:
        config: the whole configuration.
        model: the policy without weights.

    Raises:
        ModelError: the model has no linear output layer, names no decoder layers, has experts of a size that PyTorch's
            grouped products refuse, or has recurrent layers or custom attention where a role packs; rows can be so long
            that its rotary frequencies change; it has no routers for `actor.moe`; or its weights are quantized and
            can't be loaded, or not by vLLM as the trainer loads them.
    """
    output_head(model)
    decoder_layers(Policy(model))
    check_experts(config, model)
    if recipe_of(config).generates:
        _check_engine_weights(config, model.config)
        check_engine(config, model)
        check_rollout_length(config, model)
    for role in _roles(config):
        check_packing(config, role, model)
        if not config.model.trust_remote_code:
            _check_outputs(config, model, role)


def check_own_model(config: Config, role: str, model: PreTrainedModel, vocab_size: int) -> None:
    """Raise if the model of a critic's or reward model's own path can't be run as configured.

    Args:
        config: the whole configuration.
        role: `critic` or `reward_model`.
        model: the role's model without weights.
        vocab_size: the policy's tokens.

    Raises:
        ModelError: names the path's key. The model has fewer tokens than the policy or names no decoder layers, rows
            can be longer than its positions or its rotary frequencies allow, its experts have a size that PyTorch's
            grouped products refuse, or it can't be run in the role's layout.
    """
    try:
        check_vocabulary(model, vocab_size)
        decoder_layers(ScalarHeadModel(language_model(model)))
        check_rollout_length(config, model)
    except ModelError as error:
        raise ModelError(f"{_source(config, role)}: {error}") from error
    check_expert_sizes(config, model, [role])
    check_packing(config, role, model)
    _check_outputs(config, model, role)


def check_experts(config: Config, model: PreTrainedModel) -> None:
    """Raise if the policy's experts can't be computed, or options of the actor need routers that it doesn't have.

    Raises:
        ModelError: experts have a size that PyTorch's grouped products refuse; the model has no experts, or its routers
            don't choose or score them in a known way.
    """
    check_expert_sizes(config, model, list(_roles(config)))
    chosen = [name for name, value in config.actor.moe if value]
    if not chosen:
        return
    try:
        check_routers(model, scored=config.actor.moe.balance_coefficient > 0)
    except ModelError as problem:
        key, off = f"actor.moe.{chosen[0]}", str(Experts.model_fields[chosen[0]].default).lower()
        kind = f"{type(model).__name__} ({model.config.model_type})"
        raise ModelError(
            f"{key} needs a mixture of experts; {kind} can't have it: {problem}; set {key}={off}"
        ) from problem


def check_expert_sizes(config: Config, model: PreTrainedModel, roles: Sequence[str]) -> None:
    """Raise if PyTorch's grouped products can't compute a model's experts in fp32, or in a role's precision.

    Rows of stacked weights have to be multiples of 16 bytes long.

    Args:
        config: the whole configuration.
        model: with or without weights.
        roles: those that run the model.

    Raises:
        ModelError: names the size of the experts, the sizes that are possible, and what to set.
    """
    if model.config._experts_implementation != "grouped_mm":
        return
    half = [role for role in roles if role_compute(config, role).precision == "bf16"]
    multiple, precision = (8, "bf16") if half else (4, "fp32")
    named = [parameter for _, module in expert_modules(model) for parameter in module.named_parameters(recurse=False)]
    shapes = {name: tuple(weight.shape) for name, weight in named if weight.ndim == _STACKED}
    # Rows of the weights, and of what they are multiplied with.
    wrong = [(name, size) for name, shape in shapes.items() for size in shape[1:] if size % multiple]
    if not wrong:
        return
    settings, sizes = settings_of(model.config), {size for _, size in wrong}
    key = next((key for key in _EXPERT_SIZES if settings.get(key) in sizes), None)
    name, size = wrong[0] if key is None else (key, cast(int, settings[key]))
    given = f"{name}={size}" if key is not None else f"{size} numbers in a row of {name} {shapes[name]}"
    source = _source(config, roles[0] if roles else "actor")
    is_new = key is not None and source == _NEW_MODEL
    ways = [f"set {_NEW_MODEL}.{key}={size + -size % multiple}" if is_new else "use another model"]
    if half and not any(size % 4 for size in sizes):
        ways.append("set " + " ".join(f"{role}.precision=fp32" for role in half))
    raise ModelError(
        f"{source}: {type(model).__name__} ({model.config.model_type}) has experts of {given}, and PyTorch computes "
        f"experts in {precision} only if it is a multiple of {multiple} (16 bytes); {', or '.join(ways)}"
    )


def check_packing(config: Config, role: str, model: PreTrainedModel) -> None:
    """Raise if a role packs rows or splits them over ranks, and its model can't be run that way.

    Raises:
        ModelError: packed rows can't be kept apart, the ranks don't divide the attention heads, or its weights are
            quantized in a way that can't be loaded.
    """
    check_quantization(model.config, _source(config, role))
    kind = f"{type(model).__name__} ({model.config.model_type})"
    if runs_packed(config, role) and (reason := _unpackable(model)):
        parallel = role_parallel(config, role)
        shared: Change = {name: 1 for name in ("cp", "tp") if getattr(parallel, name) > 1}
        sizes = (remedy(config, role, [shared]) or overrides(role, shared)) if shared else ""
        mode = f"{batching_key(role)}.mode=dynamic" if role_batching(config, role).mode == "packed" else ""
        raise ModelError(
            f"{kind} can't be run packed as the {role}: {reason}; set {' '.join(filter(None, (sizes, mode)))}"
            + " or fixed" * bool(mode)
        )
    if problem := split_sizes_problem(config, role, model):
        raise ModelError(f"{kind} {problem}")


def _source(config: Config, role: str) -> str:
    """Return the key and the path of a role's model, or the section of a new one, for errors."""
    path = {"critic": config.critic.path, "reward_model": config.reward_model.path}.get(role)
    if path is not None:
        return f"{role}.path ({path!r})"
    return _NEW_MODEL if config.model.path is None else f"model.path ({config.model.path!r})"


def _check_engine_weights(config: Config, model: PreTrainedConfig) -> None:
    """Raise if vLLM would quantize the policy's weights or keep them quantized: they can't take the trainer's then.

    Raises:
        ModelError: the weights are quantized, or an argument of vLLM asks for it.
    """
    if config.rollout.engine != "vllm":
        return
    for name in ("quantization", "quantization_config"):
        if config.rollout.vllm.get(name):
            raise ModelError(
                f"rollout.vllm.{name}: vLLM would quantize its weights, and can't take the trainer's; remove it"
            )
    if (method := quantization_method(model)) is not None:
        raise ModelError(
            f"{_source(config, 'actor')} has weights that are quantized by {method}; vLLM would keep them quantized, "
            "and can't take the trainer's; set rollout.engine=hf, or a model whose weights aren't quantized"
        )


def check_rollout_length(config: Config, model: PreTrainedModel) -> None:
    """Raise if rollouts are longer than a model's rotary frequencies or learned positions allow.

    Raises:
        ModelError: the limit, and the keys that exceed it.
    """
    check_row_length(model.config, *rollout_length(config))
    check_positions(model, *rollout_length(config))


def check_engine(config: Config, policy: PreTrainedModel) -> None:
    """Raise if the generation engine can't run a model as configured, before anything starts.

    Raises:
        ModelError: vLLM doesn't run the architecture or heads of this size, or the model has none; the model can't be
            divided among a rank's GPUs; rows, or those that every engine has to accept, can be longer than the model's
            positions; or `rollout.kv_cache_gb` is too small for the rows.
    """
    if config.rollout.engine != "vllm":
        return
    _check_engine_class(config, policy)
    model, gpus = policy.config, int(gpus_per_rank(config, "rollout"))
    on_gpu = gpus > 0
    shape = Shape.of(model)
    if problem := shape_problem(shape, on_gpu=on_gpu):
        raise ModelError(f"rollout.engine=vllm: {problem}")
    if gpus > 1 and (problem := split_problem(model, gpus)):
        key = f"placement.pools.{pool_of(config, 'rollout')}.gpus_per_rank"
        raise ModelError(f"rollout.engine=vllm: {problem}; set {key} to a number that fits, such as 1")
    longest, parts = rollout_length(config)
    if (limit := length_limit(model)) is not None and longest > limit:
        raise ModelError(
            f"rollout.engine=vllm: rows have up to {longest} tokens ({parts}), but vLLM takes at most {limit} of this "
            f"{model.model_type} model (its max_position_embeddings); lower one of the two keys"
        )
    length = engine_length(longest)
    if limit is not None and length > limit:
        raise ModelError(
            f"rollout.engine=vllm: the engine has to take rows of {length} tokens, to compare its log-probs with the "
            f"trainer's, but vLLM takes at most {limit} of this {model.model_type} model (its "
            "max_position_embeddings); set rollout.engine=hf, or use a model with more positions"
        )
    dtype = config.rollout.dtype or config.actor.precision
    capacity = run_capacity(config.rollout, dtype=dtype, max_length=length, gpus=gpus)
    if problem := run_cache_problem(shape, capacity):
        raise ModelError(problem)


def _check_engine_class(config: Config, model: PreTrainedModel) -> None:
    """Raise unless the installed vLLM runs a model's class; custom code is left to vLLM."""
    if config.model.trust_remote_code or find_spec("vllm") is None:  # other checks report a missing vLLM
        return
    if "vision_config" in model.config.to_dict() and find_spec("torchvision") is None:
        raise ModelError(
            f"rollout.engine=vllm: vLLM needs torchvision for models that also read images, such as this "
            f"{model.config.model_type} model, and it isn't installed; install the version for this PyTorch, or set "
            "rollout.engine=hf"
        )
    if problem := architecture_problem(type(model)):
        raise ModelError(f"rollout.engine=vllm: {problem}; set rollout.engine=hf, or use another model")


def rollout_length(config: Config) -> tuple[int, str]:
    """Return the tokens of the longest rollout, and the keys that bound it, for errors."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    return longest_rollout(config), f"data.max_prompt_tokens {prompt} + rollout.max_new_tokens {response}"


def _roles(config: Config) -> Iterator[str]:
    """Yield the roles that run the policy's architecture."""
    for role in ("actor", "reference", "critic"):
        if role in started_roles(config) and not (role == "critic" and config.critic.path is not None):
            yield role


def _check_outputs(config: Config, model: PreTrainedModel, role: str) -> None:
    """Raise unless a small model of this configuration, with random weights, produces the same outputs as transformers.

    A larger one is left to the ranks. One of a verified architecture is not compared. Noise is added to the weights
    because, with a small initializer_range, a leak between rows would be no larger than rounding.
    """
    packed, compute = runs_packed(config, role), role_compute(config, role)
    if not compute.isolation_check or is_verified(model.config.model_type, packed=packed):
        return
    if sum(weight.numel() for weight in model.parameters()) > _MAX_WEIGHTS:
        return
    built = _with_random_weights(model, attention.NAME if packed else own_attention.DEFAULT, _source(config, role))
    checked = Policy(built) if role in ("actor", "reference") else ScalarHeadModel(language_model(built))
    checked.checkpoint_activations(compute.gradient_checkpointing, role)
    vocab_size, limits = built.config.get_text_config().vocab_size, RowLimits.of_role(config, role)
    trained = role in recipe_of(config).trains
    check_model(checked, "cpu", vocab_size, role=role, packed=packed, limits=limits, trained=trained)


def _with_random_weights(model: PreTrainedModel, attention_name: str, source: str) -> PreTrainedModel:
    """Return a model of the same class and configuration with random weights, in fp32."""
    attention.register()

    def build(name: str) -> PreTrainedModel:
        return type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name, dtype=torch.float32)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = with_attention(build, attention_name, source)
        with torch.no_grad():
            for weight in built.parameters():
                weight.add_(_NOISE * torch.randn_like(weight))
    return built


def _unpackable(model: PreTrainedModel) -> str | None:
    """Return why packed rows can't be kept apart in a model; None if they can."""
    if model._is_stateful:
        return "it has recurrent layers, whose state would pass from one packed row to the next"
    if model.config.get_text_config().to_dict().get("attn_temperature_tuning"):
        return "its queries are scaled by their slot in the packed row (attn_temperature_tuning)"
    if not model._can_set_attn_implementation():
        return "its attention layers don't call transformers' attention interface"
    return None

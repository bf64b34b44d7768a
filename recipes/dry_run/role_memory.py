"""The memory of a role's model on one rank, by simulating a step on tensors without values.

The model is divided by the functions that ranks call (`rlpack.workers.build`), so every layout counts as it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.config.layout_sizes import layout_sizes
from rlpack.config.recipes import recipe_of
from rlpack.config.roles import gpus_per_rank, optimizers, pool_of, role_compute, role_parallel
from rlpack.config.schema import Config, Model
from rlpack.config.sections.optimization import Optimizer
from rlpack.data.tokenization import pad_id
from rlpack.distributed.context import RankContext
from rlpack.distributed.layout import ParallelLayout
from rlpack.models import attention
from rlpack.models.fake_ranks import call_on_fake_rank
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.kernel_device import kernels_of
from rlpack.models.loading import build_meta_classifier, build_meta_model, check_classifier, linear_head
from rlpack.models.memory_simulation import (
    ModelMemory,
    SimulatedMicrobatch,
    SimulatedPass,
    simulate_forward,
    simulate_update,
    with_forward,
)
from rlpack.models.optimizers import freeze
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.parallel import SMALL_BYTES, weight_bytes
from rlpack.models.pipeline_parallel import meta_copy, stage_layers
from rlpack.models.policy import Policy
from rlpack.models.repeated_layers import find_repetition, own_layers
from rlpack.models.stage_wiring import LAYERS, wiring_problem
from rlpack.workers.build import divide_weights, set_trained_weights, share_rows

# Built-in roles that run a model which ranks share.
MODEL_ROLES = ("actor", "critic", "reference", "reward_model")


def role_layout(config: Config, role: str) -> ParallelLayout:
    """Return how the ranks of a role divide rows and the model."""
    return ParallelLayout(**layout_sizes(config, role, config.placement.pools[pool_of(config, role)].ranks))


def is_trained(config: Config, role: str) -> bool:
    """Return whether the recipe trains a role."""
    return role in recipe_of(config).trains


def role_memory(
    config: Config,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    microbatch: SimulatedMicrobatch,
    *,
    several: bool,
    forward: SimulatedMicrobatch | None = None,
) -> ModelMemory:
    """Return the memory of a role's model on the rank that needs most.

    Within a pipeline stage, no rank has larger parts than the first one. The first stage keeps the activations of the
    most microbatches, and the last one has the output layer. A stage between them needs most only if its layers are
    larger, such as those with experts after dense ones.

    Args:
        config: the whole configuration.
        role: one of `MODEL_ROLES`.
        tokenizer: the policy's.
        microbatch: the largest one.
        several: whether an optimizer step has several microbatches.
        forward: the largest one of a trained role's passes without gradients; None if they use the update's.
    """
    layout, settings = role_layout(config, role), role_compute(config, role)
    device = "cuda" if gpus_per_rank(config, role) else "cpu"

    whole = _without_values(meta_model(config, role, tokenizer))
    whole.checkpoint_activations(settings.gradient_checkpointing, role)

    def build(rank: int, left_out: Sequence[nn.Module]) -> PackedModel:
        context = RankContext(pool_of(config, role), rank, layout, "cpu")
        model = meta_copy(whole, left_out)
        with kernels_of(device):
            divide_weights(model, config, role, context, settings.precision)
        share_rows(model, config, role, context)
        return model

    def update(model: PackedModel) -> SimulatedPass:
        # Losses of the policy read entropies, if only for a metric.
        of_update: dict[str, Any] = {"several": several, "entropy": role == "actor", "device": device}
        return simulate_update(model, microbatch, optimizers(config)[f"{role}.optimizer"], **of_update)

    def simulate(rank: int, run: Callable[[PackedModel], SimulatedPass], optimizer: Optimizer | None) -> ModelMemory:
        return _of_all_layers(partial(build, rank), run, _layers_of(whole, config, role, rank)).memory(
            optimizer, settings.offload
        )

    def of_rank(rank: int) -> ModelMemory:
        if not is_trained(config, role):
            return simulate(rank, partial(simulate_forward, microbatch=microbatch, device=device), None)
        trained = simulate(rank, update, optimizers(config)[f"{role}.optimizer"])
        if forward is None:
            return trained
        options: dict[str, Any] = {"microbatch": forward, "entropy": role == "actor", "device": device}
        return with_forward(trained, simulate(rank, partial(simulate_forward, **options), None))

    stages_to_try = _stages_to_try(config, role, tokenizer, layout.pp)
    ranks = [stage * layout.world_size // layout.pp for stage in stages_to_try]
    stages = [call_on_fake_rank(rank, layout.world_size, partial(of_rank, rank)) for rank in ranks]
    largest = max(stages, key=lambda memory: memory.peak)
    return replace(largest, transient=max(memory.transient for memory in stages))


def _layers_of(whole: PackedModel, config: Config, role: str, rank: int) -> Sequence[nn.Module]:
    """Return the layers of a rank if they run one after the other, and nothing else reads or shares what they hold.

    A small model is sharded as one unit, and quickly simulated: for it, none are returned.
    """
    layout, parallel = role_layout(config, role), role_parallel(config, role)
    if parallel.vpp > 1 or weight_bytes(whole) <= SMALL_BYTES or wiring_problem(whole.model) is not None:
        return []
    layers = own_layers(whole)
    run = stage_layers(len(layers), layout.pp)[rank * layout.pp // layout.world_size]
    return layers[run.start : run.stop]


def _of_all_layers(
    build: Callable[[Sequence[nn.Module]], PackedModel],
    run: Callable[[PackedModel], SimulatedPass],
    layers: Sequence[nn.Module],
) -> SimulatedPass:
    """Return a rank's pass through its layers, simulated with fewer of them where they repeat.

    Args:
        build: returns the rank's model without some layers.
        run: simulates the pass.
        layers: the rank's layers; none if all must be simulated.
    """
    repetition = find_repetition(layers)
    if repetition is not None:
        short, longer = (run(build(repetition.left_out(layers, kept))) for kept in range(2))
        whole = short.with_layers(longer, repetition)
        if whole is not None:
            return whole
    return run(build(()))


def _stages_to_try(config: Config, role: str, tokenizer: PreTrainedTokenizerBase, num_stages: int) -> list[int]:
    """Return the first and the last stage, and those between them with more weights in their layers than the first.

    Of stages whose layers have the same sizes, the first one is returned.
    """
    if num_stages < 3:
        return list(range(num_stages))
    whole = meta_model(config, role, tokenizer)
    layers = language_model(whole.model).get_submodule(LAYERS).children()
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    runs = stage_layers(len(sizes), num_stages * role_parallel(config, role).vpp)
    of_stages = [
        sorted(sizes[layer] for run in runs[stage::num_stages] for layer in run) for stage in range(num_stages)
    ]
    larger: dict[tuple[int, ...], int] = {}
    for stage in range(1, num_stages - 1):
        if sum(of_stages[stage]) > sum(of_stages[0]):
            larger.setdefault(tuple(of_stages[stage]), stage)
    return [0, *larger.values(), num_stages - 1]


def meta_model(config: Config, role: str, tokenizer: PreTrainedTokenizerBase) -> PackedModel:
    """Return a role's model without values, with adapters and frozen weights, as a rank builds it before sharding."""
    built = _packing(transformers_model(config, role, tokenizer))
    if role == "reward_model":
        return ScalarHeadModel(language_model(built), linear_head(built))
    if role == "critic":
        critic = ScalarHeadModel(language_model(built))
        freeze(critic.pattern_root, config.critic.optimizer, "critic.optimizer")
        return critic
    if role == "actor":
        set_trained_weights(built, config.actor, seed=config.seed)
    return Policy(built, chunk=role_compute(config, role).logprob_chunk)


def transformers_model(config: Config, role: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model of transformers that a role's model is built from, on the meta device.

    A critic is built from a language model, including its head.
    """
    section, key = model_of(config, role)
    if role == "reward_model":
        assert section.path is not None, "a reward model is started only with a path"
        return build_meta_classifier(check_classifier(config.reward_model, tokenizer), section.path)
    return build_meta_model(section, vocab_size=len(tokenizer), pad_token_id=pad_id(tokenizer), key=key)


def model_of(config: Config, role: str) -> tuple[Model, str]:
    """Return the section that describes a role's model, and the key of its path."""
    own = {"critic": config.critic, "reward_model": config.reward_model}.get(role)
    if own is None or own.path is None:
        return config.model, "model.path"
    return Model(path=own.path, revision=own.revision), f"{role}.path"


def _packing(model: PreTrainedModel) -> PreTrainedModel:
    """Have a model use the attention of packed rows."""
    attention.register()
    model.config._attn_implementation = attention.NAME
    return model


def _without_values(model: PackedModel) -> PackedModel:
    """Move weights that have values, such as those of new adapters and heads, to the meta device."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.is_meta:
                empty = torch.empty_like(weight, device="meta")
                module.register_parameter(name, nn.Parameter(empty, requires_grad=weight.requires_grad))
    return model

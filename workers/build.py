"""Build a role's model on a rank: from the configuration, and from weights that other roles send.

Every function that shards or checks a model is a collective: all ranks of the pool call it.
"""

import copy
import logging
from typing import Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import role_compute, role_parallel, runs_packed
from rlpack.config.schema import Actor, Config, Model
from rlpack.data.tokenization import eos_id, pad_id
from rlpack.distributed.meshes import new_mesh
from rlpack.malloc_settings import returning_freed_memory
from rlpack.models import attention, own_attention
from rlpack.models.adapters import add_adapters
from rlpack.models.check_adapters import check_adapters
from rlpack.models.check_rows import RowLimits
from rlpack.models.check_split import TESTED_FAMILIES, Scores, check_split, score_undivided, score_whole_rows
from rlpack.models.checks import check_isolation, check_model, check_scores
from rlpack.models.compiled_layers import compile_layers
from rlpack.models.context_parallel import RowSplit
from rlpack.models.cpu_products import agree_on_rounding
from rlpack.models.expert_parallel import ExpertSplit, split_experts
from rlpack.models.heads import ScalarHeadModel, hidden_size
from rlpack.models.loading import build_causal_lm, linear_head, load_classifier
from rlpack.models.new_model import NewModel
from rlpack.models.open_model import open_causal_lm, open_classifier, open_new_causal_lm
from rlpack.models.optimizers import freeze
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.parallel import reshard, shard_model
from rlpack.models.parts import share_weights
from rlpack.models.pipeline_parallel import cut_model, meta_copy
from rlpack.models.policy import Policy
from rlpack.models.stage_link import StageLink, groups_of_links
from rlpack.models.stored_model import NotInPartsError, StoredModel
from rlpack.models.tensor_parallel import split_weights
from rlpack.models.value_head import stored_value_head
from rlpack.models.weight_split import WeightSplit
from rlpack.worker import RankContext

_log = logging.getLogger(__name__)

# A new model of at most this size is built whole on each rank, and compared with itself before ranks share it.
WHOLE_BYTES = 128 * 2**20
M = TypeVar("M", bound=PackedModel)


def build_model(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    context: RankContext,
    *,
    seed: int,
    attention_name: str = attention.NAME,
    key: str = "model.path",
) -> PreTrainedModel:
    """Return the causal language model for the tokenizer, on the rank's device; errors name the path's key."""
    return build_causal_lm(
        model,
        vocab_size=len(tokenizer),
        eos_token_id=eos_id(tokenizer),
        pad_token_id=pad_id(tokenizer),
        seed=seed,
        device=context.torch_device,
        attention_name=attention_name,
        key=key,
    )


def build_policy(config: Config, role: str, tokenizer: PreTrainedTokenizerBase, context: RankContext) -> Policy:
    """Return the policy of a role, sharded and checked.

    Only the actor's policy gets adapters and frozen weights.

    Args:
        config: read for `model`, and for the role's compute settings and batching.
        role: `actor`, or `reference`.
        tokenizer: the policy's tokenizer.
        context: the rank's place in the pool.

    Raises:
        ModelError: a pattern of `actor` matches no weight or layer of this model, or an adapter has no effect.
        IsolationError: packed sequences see each other in this model.
    """
    lm, stored = open_model(config.model, tokenizer, context, config.seed, role, _attention(config, role))
    if role == "actor":
        set_trained_weights(lm, config.actor, seed=config.seed)
    policy = Policy(lm, chunk=role_compute(config, role).logprob_chunk)
    return _shard_and_check(policy, config, role, tokenizer, context, stored)


def build_critic(config: Config, tokenizer: PreTrainedTokenizerBase, context: RankContext) -> ScalarHeadModel:
    """Return a critic, sharded and checked; its value head is that of `critic.path` if the files have one, else new.

    Raises:
        ModelError: a pattern of `critic.optimizer` matches no weight, or the stored value head has other shapes.
        IsolationError: packed sequences see each other in this model.
    """
    path = config.critic.path
    model = config.model if path is None else Model(path=path, revision=config.critic.revision)
    key, name = "model.path" if path is None else "critic.path", _attention(config, "critic")
    lm, stored = open_model(model, tokenizer, context, config.seed, "critic", name, key=key)
    critic = ScalarHeadModel(language_model(lm))
    head = None if path is None else stored_value_head(model, hidden_size(critic.model), key)
    if head is not None:
        critic.head.load_state_dict(head)
    freeze(critic.pattern_root, config.critic.optimizer, "critic.optimizer")
    return _shard_and_check(critic, config, "critic", tokenizer, context, stored)


def build_reward_model(config: Config, tokenizer: PreTrainedTokenizerBase, context: RankContext) -> ScalarHeadModel:
    """Return the classifier of `reward_model.path`, sharded and checked.

    Raises:
        ModelError: the classifier has more than one label, or no linear head.
        IsolationError: packed sequences see each other in this model.
    """
    settings, name = config.reward_model, _attention(config, "reward_model")
    stored = None
    try:
        stored = open_classifier(settings, vocab_size=len(tokenizer), attention_name=name)
        classifier = stored.model
    except NotInPartsError as reason:
        _note_whole(context, "reward_model", settings.path, reason)
        device = context.torch_device
        classifier = load_classifier(settings, vocab_size=len(tokenizer), device=device, attention_name=name)
    model = ScalarHeadModel(language_model(classifier), linear_head(classifier))
    return _shard_and_check(model, config, "reward_model", tokenizer, context, stored, classifier)


def set_trained_weights(lm: PreTrainedModel, settings: Actor, *, seed: int) -> None:
    """Add adapters where `settings.lora` asks for them, and freeze the weights that are not trained.

    Raises:
        ModelError: a pattern matches no weight or layer of this model, or nothing is left to train.
    """
    if settings.lora.rank > 0:
        add_adapters(lm, settings.lora, seed=seed)
    freeze(lm, settings.optimizer)


def open_model(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    context: RankContext,
    seed: int,
    role: str,
    attention_name: str,
    *,
    key: str = "model.path",
) -> tuple[PreTrainedModel, StoredModel | NewModel | None]:
    """Return a causal language model on the meta device and the source of its weights, or the whole model and None.

    Errors name the path's key.
    """
    try:
        opened = open_in_parts(model, tokenizer, seed, attention_name, key=key)
        if opened is not None:
            return opened.model, opened
    except NotInPartsError as reason:
        _note_whole(context, role, model.path or "model.config", reason)
    return build_model(model, tokenizer, context, seed=seed, attention_name=attention_name, key=key), None


def open_in_parts(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    attention_name: str = attention.NAME,
    *,
    key: str = "model.path",
) -> StoredModel | NewModel | None:
    """Return a causal language model on the meta device with the source of its weights; None if it is new and small.

    Errors name the path's key.

    Raises:
        NotInPartsError: every rank loads or builds it whole; the message says why.
    """
    if model.path is not None:
        return open_causal_lm(model, vocab_size=len(tokenizer), attention_name=attention_name, key=key)
    opened = open_new_causal_lm(
        model,
        vocab_size=len(tokenizer),
        eos_token_id=eos_id(tokenizer),
        pad_token_id=pad_id(tokenizer),
        seed=seed,
        attention_name=attention_name,
    )
    return opened if whole_bytes(opened.model) > WHOLE_BYTES else None


def whole_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a whole model, which are fp32 until it is sharded."""
    return 4 * sum(weight.numel() for weight in model.parameters())


def _note_whole(context: RankContext, role: str, path: str | None, reason: NotInPartsError) -> None:
    """Log why every rank loads the whole model."""
    if context.rank == 0 and context.num_ranks > 1:
        _log.warning("%s: every rank has all weights of %s before they are sharded: %s", role, path, reason)


@returning_freed_memory()
def _shard_and_check(
    model: M,
    config: Config,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    context: RankContext,
    in_parts: StoredModel | NewModel | None = None,
    classifier: PreTrainedModel | None = None,
) -> M:
    """Checkpoint activations, check the model, shard it, and check isolation, by the role's settings.

    Outputs and gradients are compared with transformers' own in fp32: before sharding if every rank holds the whole
    model, after sharding if it is built in parts. Outputs are compared with each other in the compute dtype and with
    its kernels. A model whose experts or layers are divided among ranks (ep, pp) is compared with the undivided model,
    unless its family is tested on all layouts or the check is off. If the model is built in parts, this reads its
    weights twice.
    """
    settings, device, layout = role_compute(config, role), context.torch_device, context.layout
    model.checkpoint_activations(settings.gradient_checkpointing, role)
    whole: Scores | None = None
    packed, vocab_size = runs_packed(config, role), len(tokenizer)
    is_divided = layout.cp * layout.tp * layout.ep * layout.pp > 1
    checks_split = settings.isolation_check and is_divided
    if is_divided and device.type == "cpu":
        agree_on_rounding()
    if in_parts is None:
        _check(model, config, role, device, vocab_size, classifier)
        whole = score_whole_rows(model, device, vocab_size, packed=packed) if checks_split else None
        divide_weights(model, config, role, context, settings.precision)
    else:
        undivided: Scores | None = None
        if checks_split and layout.ep * layout.pp > 1 and model.model.config.model_type not in TESTED_FAMILIES:
            mesh = new_mesh(context.device, {"dp_shard": context.num_ranks})
            undivided = score_undivided(
                model, in_parts, mesh, device, vocab_size, packed=packed, offload=settings.offload
            )
        in_precision = copy.deepcopy(model)  # without weights; FSDP2 can't change the precision of a sharded model
        weights_device = "cpu" if settings.offload == "parameters" else device
        in_parts.materialize(divide_weights(model, config, role, context, "fp32"), device, weights_device)
        if isinstance(model, Policy):
            model.measure_outputs()
        if undivided is not None:
            check_split(model, undivided, device, vocab_size, role=role, packed=packed)
        _check(model, config, role, device, vocab_size, classifier)
        reshard(model)
        if settings.precision != "fp32":
            share_weights(model, divide_weights(in_precision, config, role, context, settings.precision))
            if isinstance(in_precision, Policy) and isinstance(model, Policy):
                in_precision.output_map = model.output_map
            model = in_precision
        whole = score_whole_rows(model, device, vocab_size, packed=packed) if checks_split and layout.cp > 1 else None
    share_rows(model, config, role, context)
    if settings.compile:
        model.compiled = compile_layers(model, role)
    if whole is not None:
        check_split(model, whole, device, vocab_size, role=role, packed=packed)
    _check_isolation(model, config, role, device, vocab_size)
    return model


def divide_weights(model: M, config: Config, role: str, context: RankContext, precision: Literal["fp32", "bf16"]) -> M:
    """Divide a model's layers and their weights among the ranks, in place, and return the model."""
    layout, mesh, expert_mesh = context.layout, context.layout.weight_mesh(context.device), None
    whole = meta_copy(model) if layout.pp > 1 else None
    if layout.ep > 1:
        expert_mesh = layout.expert_mesh(context.device)
        model.expert_split = ExpertSplit(expert_mesh)
        split_experts(model, model.expert_split)
        expert_mesh = _sharding_dimensions(expert_mesh)
    if layout.tp > 1:
        model.weight_split = WeightSplit(mesh["tp"], sequence_parallel=role_parallel(config, role).sp)
        split_weights(model, model.weight_split)
        model.split = RowSplit.of_group(None, layout.tp)
    if whole is not None:
        num_virtual = role_parallel(config, role).vpp
        count = 1 + max(groups_of_links(layout.pp, num_virtual))
        groups = [layout.pipeline_group(context.device) for _ in range(2 * count)]
        cut_model(model, StageLink(groups[:count], groups[count:], context.torch_device, num_virtual), whole)
    settings = role_compute(config, role)
    shard_model(
        model,
        _sharding_dimensions(mesh),
        expert_mesh=expert_mesh,
        precision=precision,
        reshard_after_forward=settings.reshard_after_forward,
        offload=settings.offload,
    )
    if model.stage is not None:
        model.stage.dtype = model.compute_dtype
    return model


def _sharding_dimensions(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions of a mesh of weights that FSDP uses."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in ("dp_replicate", "dp_shard") if name in names)]


def share_rows(model: PackedModel, config: Config, role: str, context: RankContext) -> None:
    """Have a model run only this rank's part of each row, if ranks share the tokens of a row."""
    layout = context.layout
    if layout.cp > 1:
        group, method = layout.device_mesh(context.device)["cp"].get_group(), role_parallel(config, role).cp_method
        model.split = RowSplit.of_group(group, layout.tp, method)


def _check(
    model: PackedModel,
    config: Config,
    role: str,
    device: torch.device,
    vocab_size: int,
    classifier: PreTrainedModel | None,
) -> None:
    """Check adapters, and compare outputs and gradients with transformers' own; in fp32."""
    packed = runs_packed(config, role)
    if role == "actor" and config.actor.lora.rank > 0:
        check_adapters(model, device, vocab_size, packed=packed)
    if not role_compute(config, role).isolation_check:
        return
    limits, trained = RowLimits.of_role(config, role), role in recipe_of(config).trains
    check_model(model, device, vocab_size, role=role, packed=packed, limits=limits, trained=trained)
    if classifier is not None:
        assert isinstance(model, ScalarHeadModel)
        longest, padding = limits.longest, limits.padding
        check_scores(classifier, model, vocab_size, packed=packed, longest=longest, padding=padding)


def _check_isolation(model: PackedModel, config: Config, role: str, device: torch.device, vocab_size: int) -> None:
    """Check that rows of a microbatch don't see each other, unless the role's settings leave it out."""
    if role_compute(config, role).isolation_check:
        limits, packed = RowLimits.of_role(config, role), runs_packed(config, role)
        longest, padding = limits.longest, limits.padding
        check_isolation(model, device, vocab_size, role=role, packed=packed, longest=longest, padding=padding)
        reshard(model)


def _attention(config: Config, role: str) -> str:
    """Return the attention implementation of a role: ours for packed rows, transformers' own for padded ones."""
    return attention.NAME if runs_packed(config, role) else own_attention.DEFAULT

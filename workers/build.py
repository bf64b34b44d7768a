"""Build a role's model on a rank: from the configuration, and from weights that other roles send.

Every function that shards or checks a model is a collective: all ranks of the pool call it.
"""

from pathlib import Path
from typing import TypeVar

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import role_batching, role_compute
from rlpack.config.schema import Actor, Config, Model
from rlpack.data.tokenization import eos_id, pad_id
from rlpack.distributed.errors import PlacementError
from rlpack.models import attention, own_attention
from rlpack.models.adapters import add_adapters
from rlpack.models.check_adapters import check_adapters
from rlpack.models.check_rows import RowLimits
from rlpack.models.checks import check_isolation, check_model, check_scores
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.loading import build_causal_lm, linear_head, load_classifier
from rlpack.models.optimizers import freeze
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.parallel import reshard, shard_model
from rlpack.models.policy import Policy
from rlpack.worker import RankContext

M = TypeVar("M", bound=PackedModel)


def build_model(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    context: RankContext,
    *,
    seed: int,
    attention_name: str = attention.NAME,
) -> PreTrainedModel:
    """Return the causal language model for the tokenizer, on the rank's device."""
    return build_causal_lm(
        model,
        vocab_size=len(tokenizer),
        eos_token_id=eos_id(tokenizer),
        pad_token_id=pad_id(tokenizer),
        seed=seed,
        device=context.torch_device,
        attention_name=attention_name,
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
    lm = build_model(config.model, tokenizer, context, seed=config.seed, attention_name=_attention(config, role))
    if role == "actor":
        set_trained_weights(lm, config.actor, seed=config.seed)
    policy = Policy(lm, chunk=role_compute(config, role).logprob_chunk)
    if role == "actor" and config.actor.lora.rank > 0:
        packed = role_batching(config, role).mode == "packed"
        check_adapters(policy, context.torch_device, len(tokenizer), packed=packed)
    return _shard_and_check(policy, config, role, tokenizer, context)


def build_critic(config: Config, tokenizer: PreTrainedTokenizerBase, context: RankContext) -> ScalarHeadModel:
    """Return a critic with a new value head, sharded and checked.

    Raises:
        ModelError: a pattern of `critic.optimizer` matches no weight.
        IsolationError: packed sequences see each other in this model.
    """
    path = config.critic.path
    model = config.model if path is None else Model(path=path, revision=config.critic.revision)
    lm = build_model(model, tokenizer, context, seed=config.seed, attention_name=_attention(config, "critic"))
    critic = ScalarHeadModel(language_model(lm))
    freeze(critic.pattern_root, config.critic.optimizer, "critic.optimizer")
    return _shard_and_check(critic, config, "critic", tokenizer, context)


def build_reward_model(config: Config, tokenizer: PreTrainedTokenizerBase, context: RankContext) -> ScalarHeadModel:
    """Return the classifier of `reward_model.path`, sharded and checked.

    Raises:
        ModelError: the classifier has more than one label, or no linear head.
        IsolationError: packed sequences see each other in this model.
    """
    classifier = load_classifier(
        config.reward_model,
        vocab_size=len(tokenizer),
        device=context.torch_device,
        attention_name=_attention(config, "reward_model"),
    )
    model = ScalarHeadModel(language_model(classifier), linear_head(classifier))
    return _shard_and_check(model, config, "reward_model", tokenizer, context, classifier)


def set_trained_weights(lm: PreTrainedModel, settings: Actor, *, seed: int) -> None:
    """Add adapters where `settings.lora` asks for them, and freeze the weights that are not trained.

    Raises:
        ModelError: a pattern matches no weight or layer of this model, or nothing is left to train.
    """
    if settings.lora.rank > 0:
        add_adapters(lm, settings.lora, seed=seed)
    freeze(lm, settings.optimizer)


def read_weights(folder: str) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face model folder, from its safetensors files."""
    weights: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def _shard_and_check(
    model: M,
    config: Config,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    context: RankContext,
    classifier: PreTrainedModel | None = None,
) -> M:
    """Checkpoint activations, check the model, shard, and check isolation, by the role's settings.

    Outputs and gradients are compared with transformers' own before the model is sharded, in fp32; outputs are compared
    with each other afterwards, in the compute dtype and with its kernels.
    """
    settings = role_compute(config, role)
    packed = role_batching(config, role).mode == "packed"
    limits, trained = RowLimits.of_role(config, role), role in recipe_of(config).trains
    if settings.gradient_checkpointing:
        model.checkpoint_activations(role)
    if settings.isolation_check:
        device, vocab_size = context.torch_device, len(tokenizer)
        check_model(model, device, vocab_size, role=role, packed=packed, limits=limits, trained=trained)
        if classifier is not None:
            assert isinstance(model, ScalarHeadModel)
            check_scores(classifier, model, vocab_size, packed=packed, longest=limits.longest)
    if context.layout.world_size > context.layout.dp_size:
        raise PlacementError(f"role {role}: no model has tensor, context or pipeline parallelism yet: {context.layout}")
    mesh = context.layout.device_mesh(context.device)
    shard_model(model, mesh, precision=settings.precision, reshard_after_forward=settings.reshard_after_forward)
    if settings.isolation_check:
        check_isolation(model, context.torch_device, len(tokenizer), role=role, packed=packed, longest=limits.longest)
        reshard(model)
    return model


def _attention(config: Config, role: str) -> str:
    """Return the attention implementation of a role: ours for packed rows, transformers' own for padded ones."""
    return attention.NAME if role_batching(config, role).mode == "packed" else own_attention.DEFAULT

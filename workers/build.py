"""Building a model on a rank, from configuration and from weights that came over the wire."""

from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.config.schema import Actor, Config, Model
from rlpack.data.tokenisation import eos_id, pad_id
from rlpack.models import attention
from rlpack.models.adapters import add_adapters
from rlpack.models.checks import check_isolation
from rlpack.models.heads import TokenHead
from rlpack.models.loading import build_causal_lm, linear_head, load_classifier
from rlpack.models.optimizers import freeze
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard, shard_policy
from rlpack.models.policy import Policy
from rlpack.packing import Batching
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
    """Return the language model that belongs to the tokenizer, on the rank's device."""
    return build_causal_lm(
        model,
        vocab_size=len(tokenizer),
        eos_token_id=eos_id(tokenizer),
        pad_token_id=pad_id(tokenizer),
        seed=seed,
        device=context.torch_device,
        attention_name=attention_name,
    )


def build_policy(
    model: Model,
    settings: Actor,
    tokenizer: PreTrainedTokenizerBase,
    context: RankContext,
    *,
    batching: Batching,
    seed: int,
    trained: bool = False,
) -> Policy:
    """Return the policy, sharded over the pool's ranks and, where it is to be packed, checked for isolation.

    A collective.

    Args:
        model: where weights come from.
        settings: precision, checkpointing and the like.
        tokenizer: whose ids the model reads.
        context: the rank's place.
        batching: the role's; a model that leaks when packed is right when padded, so only packing is checked.
        seed: of a new model's weights, and of adapters.
        trained: whether it gets the adapters, or the frozen weights, that the settings ask for.

    Raises:
        ModelError: a pattern of the settings matches no weight or layer of this model.
        IsolationError: packed sequences see each other in this model.
    """
    lm = build_model(model, tokenizer, context, seed=seed)
    if trained:
        choose_trained(lm, settings, seed=seed)
    return _prepared(Policy(lm, chunk=settings.logprob_chunk), settings, tokenizer, context, batching)


def build_critic(
    config: Config, tokenizer: PreTrainedTokenizerBase, context: RankContext, *, batching: Batching
) -> TokenHead:
    """Return a critic with a new head, sharded as the policy is and, where it is to be packed, checked for isolation.

    A collective.

    Raises:
        ModelError: a pattern of `critic.optimizer` matches no weight.
        IsolationError: packed sequences see each other in this model.
    """
    path, settings = config.critic.path, config.actor
    model = config.model if path is None else Model(path=path, revision=config.critic.revision)
    lm = build_model(model, tokenizer, context, seed=config.seed)
    critic = TokenHead(cast(PreTrainedModel, lm.base_model))
    freeze(critic.named, config.critic.optimizer, "critic.optimizer")
    return _prepared(critic, settings, tokenizer, context, batching)


def build_reward_model(
    config: Config, tokenizer: PreTrainedTokenizerBase, context: RankContext, *, batching: Batching
) -> TokenHead:
    """Return the classifier of `reward_model.path`, sharded and checked as the policy is; a collective.

    Raises:
        ModelError: it has more than one label, or no linear head.
        IsolationError: packed sequences see each other in this model.
    """
    vocab_size, device = len(tokenizer), context.torch_device
    classifier = load_classifier(config.reward_model, vocab_size=vocab_size, device=device)
    model = TokenHead(cast(PreTrainedModel, classifier.base_model), linear_head(classifier))
    return _prepared(model, config.actor, tokenizer, context, batching)


def _prepared(
    model: M, settings: Actor, tokenizer: PreTrainedTokenizerBase, context: RankContext, batching: Batching
) -> M:
    """Checkpoint activations, shard, and check isolation, as the settings say; a collective."""
    if settings.gradient_checkpointing:
        model.checkpoint_activations()
    mesh = init_device_mesh(context.device, (context.num_ranks,), mesh_dim_names=("data",))
    shard_policy(model, mesh, precision=settings.precision, reshard_after_forward=settings.reshard_after_forward)
    if settings.isolation_check and batching.mode == "packed":
        check_isolation(model, context.torch_device, len(tokenizer))
        reshard(model)
    return model


def choose_trained(lm: PreTrainedModel, settings: Actor, *, seed: int) -> None:
    """Leave for training what the settings say: adapters alone where there are to be some, else all that isn't frozen.

    Raises:
        ModelError: a pattern matches no weight or layer of this model, or nothing is left to train.
    """
    if settings.lora.rank > 0:
        add_adapters(lm, settings.lora, seed=seed)
    freeze(lm, settings.optimizer)


def to_tensors(weights: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors over the arrays' memory, copied where it is read-only (Ray maps its objects so)."""
    return {name: torch.from_numpy(array if array.flags.writeable else array.copy()) for name, array in weights.items()}


def read_weights(folder: str) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face model folder, from its safetensors files."""
    weights: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(path)
    return weights

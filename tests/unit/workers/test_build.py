"""Each role runs its model by its own settings, and by the actor's where it has none."""

from typing import Literal

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from rlpack.config.schema import Actor, Config, Model, Reference
from rlpack.config.sections.value_models import Critic
from rlpack.distributed.context import RankContext
from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.packed import PackedModel
from rlpack.models.policy import Policy
from rlpack.workers.build import build_critic, build_policy
from tests.builders import tiny_config, tiny_tokenizer
from tests.unit.workers.test_actor import leak

pytestmark = pytest.mark.usefixtures("process_group")


def policy_of(config: Config, role: str) -> Policy:
    return build_policy(config, role, tiny_tokenizer(), RankContext())


def recomputes(model: PackedModel) -> bool:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers
    return all(layer.gradient_checkpointing for layer in layers)


def test_a_reference_inherits_what_it_does_not_set():
    actor = Actor(precision="bf16", logprob_chunk=7, isolation_check=False)
    inherited = tiny_config(actor=actor)
    own = tiny_config(actor=actor, reference=Reference(precision="fp32", logprob_chunk=5))
    assert (policy_of(inherited, "reference").compute_dtype, policy_of(inherited, "reference").chunk) == (
        torch.bfloat16,
        7,
    )
    assert (policy_of(own, "reference").compute_dtype, policy_of(own, "reference").chunk) == (torch.float32, 5)
    assert policy_of(own, "actor").compute_dtype == torch.bfloat16


def test_roles_checkpoint_activations_by_their_own_settings_and_frozen_ones_never():
    config = tiny_config(
        recipe="ppo",
        actor=Actor(gradient_checkpointing="full", isolation_check=False),
        critic=Critic(gradient_checkpointing="none"),
    )
    assert recomputes(policy_of(config, "actor"))
    assert not recomputes(policy_of(config, "reference"))
    assert not recomputes(build_critic(config, tiny_tokenizer(), RankContext()))


def test_a_critic_whose_checkpointed_layers_have_dropout_is_refused_by_its_own_key():
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_attention_heads": 4}
    model = {"model_type": "opt", "num_hidden_layers": 1, "dropout": 0.1, **sizes}
    config = tiny_config(model=Model(config=model), critic=Critic(gradient_checkpointing="full"))
    with pytest.raises(ModelError, match=r"set critic\.gradient_checkpointing=none"):
        build_critic(config, tiny_tokenizer(), RankContext())


def test_the_isolation_check_of_each_role_is_its_own(monkeypatch: pytest.MonkeyPatch):
    leak(monkeypatch)
    config = tiny_config(reference=Reference(isolation_check=True), actor=Actor(isolation_check=False))
    policy_of(config, "actor")
    with pytest.raises(
        IsolationError, match=r"set reference\.batching\.mode=dynamic .*reference\.isolation_check=false"
    ):
        policy_of(config, "reference")


def test_gradients_of_trained_roles_are_checked_with_their_activation_checkpointing(monkeypatch: pytest.MonkeyPatch):
    forward = Qwen2MLP.forward

    def differs_when_recomputed(self: Qwen2MLP, states: torch.Tensor) -> torch.Tensor:
        # The graph task of a backward pass has a number; outside of one it is -1.
        return forward(self, states * (1.0 if torch._C._current_graph_task_id() < 0 else 1.1))

    monkeypatch.setattr(Qwen2MLP, "forward", differs_when_recomputed)
    kinds: tuple[Literal["none", "full"], ...] = ("none", "full")
    for kind in kinds:
        config = tiny_config(recipe="ppo", actor=Actor(), critic=Critic(gradient_checkpointing=kind))
        policy_of(config, "actor")
        policy_of(config, "reference")
        if kind == "full":
            with pytest.raises(ModelError, match=r"as the critic: .*set critic\.gradient_checkpointing=none"):
                build_critic(config, tiny_tokenizer(), RankContext())
        else:
            build_critic(config, tiny_tokenizer(), RankContext())

"""Sections of the roles with scalar heads: the critic and the reward model."""

from pydantic import Field

from rlpack.config.sections.compute import Checkpointing, RoleCompute
from rlpack.config.sections.optimization import Optimizer
from rlpack.config.sections.parallelism import RoleParallel
from rlpack.config.sections.role_batching import ForwardBatching, RoleBatching
from rlpack.config.sections.section import Positive, Unit


class Critic(RoleCompute):
    """The critic of recipe=ppo, which estimates a value for each token. Compute settings default to the actor's."""

    path: str | None = Field(
        default=None,
        description="Folder or Hub name of its initial model, with or without a value head; null for the policy at the "
        "recipe's start.",
    )
    revision: str | None = Field(default=None, description="Pinned revision of a model on the Hub.")
    gradient_checkpointing: Checkpointing | None = Field(
        default=None, description="As actor.gradient_checkpointing; null inherits it."
    )
    optimizer: Optimizer = Optimizer(learning_rate=1e-5)
    parallel: RoleParallel = RoleParallel()
    batching: RoleBatching = RoleBatching()
    forward_batching: ForwardBatching = ForwardBatching()
    warmup_steps: int = Field(
        default=0, ge=0, description="Number of steps at the start of the recipe that train only the critic."
    )
    gamma: Unit = Field(default=1.0, description="Discount factor γ, per token.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="λ of generalized advantage estimation.")
    normalize_advantages: bool = Field(
        default=True, description="Normalize the batch's advantages to mean 0 and standard deviation 1."
    )
    value_clip: Positive | None = Field(
        default=0.2,
        description="Clip range of the value loss: a value that has moved further than this from the one before the "
        "update, towards its return, gets no gradient. null disables clipping.",
    )


class RewardModel(RoleCompute):
    """A sequence classifier that scores responses, in addition to the reward functions; started only with a path.

    Compute settings that are null are the actor's.
    """

    path: str | None = Field(
        default=None, description="Folder or Hub name of a model with one label and the policy's tokenizer."
    )
    revision: str | None = Field(default=None, description="Pinned revision of a model on the Hub.")
    weight: float = Field(default=1.0, description="Factor of its scores in the sum of rewards.")
    parallel: RoleParallel = RoleParallel()
    batching: RoleBatching = RoleBatching()

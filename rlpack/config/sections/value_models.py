"""The sections of the roles that give numbers to tokens: the critic, and a model of rewards."""

from pydantic import Field

from rlpack.config.sections.compute import RoleCompute
from rlpack.config.sections.optimization import Optimizer
from rlpack.config.sections.role_batching import RoleBatching
from rlpack.config.sections.section import Positive, Unit


class Critic(RoleCompute):
    """The critic of recipe=ppo: a value of what lies before each token. It runs as the actor does, unless set."""

    path: str | None = Field(
        default=None,
        description="Folder or hub name of the model it begins as; null takes the policy as the recipe finds it.",
    )
    revision: str | None = Field(default=None, description="Pinned revision of a hub model.")
    gradient_checkpointing: bool | None = Field(
        default=None, description="As actor.gradient_checkpointing; null inherits it."
    )
    optimizer: Optimizer = Optimizer(learning_rate=1e-5)
    batching: RoleBatching = RoleBatching()
    warmup_steps: int = Field(
        default=0, ge=0, description="First steps of the recipe in which the critic alone is trained."
    )
    gamma: Unit = Field(default=1.0, description="γ: what a reward is worth one token earlier.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="λ of generalised advantage estimation.")
    normalize_advantages: bool = Field(
        default=True, description="Give the batch's advantages mean 0 and standard deviation 1."
    )
    value_clip: Positive | None = Field(
        default=0.2, description="How far an update may take a value from the one before it; null: any."
    )


class RewardModel(RoleCompute):
    """A sequence classifier that scores responses, beside the reward functions; started only with a path.

    It runs as the actor does, unless set.
    """

    path: str | None = Field(
        default=None, description="Folder or hub name of a model with one label and the policy's tokenizer."
    )
    revision: str | None = Field(default=None, description="Pinned revision of a hub model.")
    weight: float = Field(default=1.0, description="What its scores are multiplied by before they are added.")
    batching: RoleBatching = RoleBatching()

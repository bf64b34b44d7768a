"""Compiled layers are refused where they can't be combined with other settings, each with a way out."""

from typing import Literal

import pytest

from rlpack.config.roles import role_compute
from rlpack.config.rules import broken_rules
from rlpack.config.schema import Actor, Algorithm, Config, Critic, Recipe, Reference, RoleBatching
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.config.sections.parallelism import Parallel
from rlpack.packing.batching import Batching


def problems(actor: Actor, **sections: object) -> list[str]:
    return [problem for problem in broken_rules(Config(actor=actor, **sections)) if "compile" in problem]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gradient_checkpointing": "selective"}, "actor.gradient_checkpointing to full or none"),
        ({"offload": "parameters"}, "actor.offload=optimizer"),
        ({"parallel": Parallel(tp=2)}, "actor.parallel.tp=2"),
        ({"lora": Lora(rank=8)}, "actor.lora.rank=8"),
    ],
)
def test_each_conflict_is_named_with_a_way_out(settings: dict, expected: str):
    (problem,) = problems(Actor(compile=True, **settings))
    assert expected in problem
    assert "actor.compile=false" in problem
    assert not problems(Actor(compile=False, **settings))


def test_padded_rows_are_refused():
    (problem,) = problems(Actor(compile=True), batching=Batching(mode="dynamic"))
    assert "batching.mode=packed" in problem


def test_padded_rows_are_refused_under_the_key_that_pads_them():
    own = Critic(batching=RoleBatching(mode="dynamic"))
    (problem,) = problems(Actor(compile=True), recipe=Recipe(target="rlpack.recipes.ppo"), critic=own)
    assert "critic.compile is set" in problem
    assert "set critic.batching.mode=packed or critic.compile=false" in problem
    assert not problems(
        Actor(compile=True),
        recipe=Recipe(target="rlpack.recipes.ppo"),
        critic=Critic(batching=RoleBatching(mode="packed")),
    )
    inherited = problems(
        Actor(compile=True), recipe=Recipe(target="rlpack.recipes.ppo"), batching=Batching(mode="dynamic")
    )
    assert [problem.partition(" ")[0] for problem in inherited] == ["actor.compile", "critic.compile"]
    assert all("set batching.mode=packed or" in problem for problem in inherited)


def test_offloaded_parameters_with_8_bit_moments_have_no_other_offload():
    def actor(offload: Literal["parameters", "none"]) -> Actor:
        return Actor(compile=True, offload=offload, optimizer=Optimizer(name="adamw_8bit"))

    (problem,) = problems(actor("parameters"))
    assert "set actor.offload=none or actor.compile=false" in problem
    assert not any("offload" in found for found in broken_rules(Config(actor=actor("none"))))


@pytest.mark.parametrize(("recipe", "role", "other"), [("grpo", "reference", "none"), ("ppo", "critic", "optimizer")])
def test_offloaded_parameters_are_refused_with_a_value_that_the_role_may_have(recipe: str, role: str, other: str):
    def config(offload: str) -> dict:
        section = {"reference": Reference, "critic": Critic}[role](offload=offload)
        return {
            "recipe": Recipe(target=f"rlpack.recipes.{recipe}"),
            "algorithm": Algorithm(kl_coef=0.01 * (role == "reference")),
            role: section,
        }

    actor = Actor(compile=True)
    (problem,) = problems(actor, **config("parameters"))
    assert f"set {role}.offload={other} or {role}.compile=false" in problem
    assert not any("offload" in found for found in broken_rules(Config(actor=actor, **config(other))))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_packed_rows_are_compiled(checkpointing: str):
    assert not problems(Actor.model_validate({"compile": True, "gradient_checkpointing": checkpointing}))


def test_roles_inherit_the_key():
    config = Config(actor=Actor(compile=True))
    assert role_compute(config, "reference").compile
    assert not role_compute(config.model_copy(update={"reference": Reference(compile=False)}), "reference").compile

"""The settings of one role, from all sections: its batching, how it runs its model, and where."""

import re
from math import lcm

from rlpack.config.errors import ConfigError
from rlpack.config.recipes import recipe_of
from rlpack.config.schema import Config, Pool, RoleBatching, builtin_roles
from rlpack.config.sections.compute import Compute, RoleCompute
from rlpack.config.sections.optimization import Optimizer
from rlpack.config.sections.parallelism import Parallel, RoleParallel
from rlpack.config.sections.role_batching import ForwardBatching
from rlpack.packing.batching import Batching
from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import MAX_LENGTH

# Roles that run a model and never train it.
_FROZEN = ("reference", "reward_model")
# Built-in roles with a batching section.
_WITH_SECTIONS = ("critic", "reference", "reward_model")
# Built-in roles that score.
_SCORERS = ("reward", "reward_model")
# Roles with a model, which can be sharded; other roles have only data ranks.
WITH_LAYOUTS = ("actor", *_WITH_SECTIONS)
# A key of batching in an error of `Batching`, which knows no roles.
_KEY = re.compile(r"\bbatching\.(\w+)")


def calls_reward_functions(config: Config) -> bool:
    """Whether the role `reward` is the built-in one; another may call the reward functions in other ways, or not."""
    return config.roles["reward"].target == builtin_roles()["reward"].target


def role_batching(config: Config, role: str) -> Batching:
    """Return the batching of `role`: its own values, and the actor's (`batching`) for those that it leaves null.

    The token budget is that of a microbatch: max_tokens times the ranks that share its tokens (cp). With cp_method
    all_gather, alignments are raised to multiples of the 2·cp chunks of a sequence.

    A recipe's own role that isn't trained inherits no overlong=drop or truncate: it gets every row whole, as `rollout`
    and `reward` do, since the recipe needs a result for each. overlong=error still applies.

    Raises:
        ConfigError: the role doesn't exist, or its values conflict with the inherited ones.

    >>> from rlpack.config.schema import Role
    >>> judge = Role(target="judge:Judge", batching=RoleBatching(mode="fixed", micro_batch_size=2))
    >>> config = Config(roles={"judge": judge})
    >>> role_batching(config, "judge").mode, role_batching(config, "judge").max_tokens
    ('fixed', 4096)
    """
    if role not in config.roles:
        raise ConfigError([f"there is no role {role!r}; roles has: {', '.join(config.roles)}"])
    # Roles without microbatches have no token budget: prompts that they receive are never cut or dropped.
    names = ("pad_to_multiple", "length_multiple")
    multiples = {name: min(getattr(config.batching, name), config.batching.budget) for name in names}
    if role == "rollout":
        rows = min(config.rollout.max_num_seqs, MAX_LENGTH)
        return config.batching.override(
            mode="fixed",
            micro_batch_size=rows,
            overlong="own_microbatch",
            equal_rows=False,
            share_prompts=False,
            **multiples,
        )
    if role == "reward":
        return config.batching.override(overlong="own_microbatch", share_prompts=False, **multiples)
    own = own_batching(config, role)
    if role not in WITH_LAYOUTS and own.share_prompts is None:
        own = own.model_copy(update={"share_prompts": False})  # a role's code may not know of shared slots
    if own.overlong is None and _is_called_for_its_rows(config, role) and config.batching.overlong != "error":
        own = own.model_copy(update={"overlong": "own_microbatch"})
    try:
        batching = config.batching.override(**own.model_dump())
        return _for_shared_rows(config, role, batching) if role in WITH_LAYOUTS else batching
    except PackingError as error:
        raise ConfigError([_with_own_keys(config, role, str(error), forward=False)]) from error


def _is_called_for_its_rows(config: Config, role: str) -> bool:
    """Return whether only the recipe calls a role, for the rows that it returns: its own role that it doesn't train."""
    spec = recipe_of(config)
    return role in spec.own_roles and role not in spec.trains


def forward_batching(config: Config, role: str) -> Batching | None:
    """Return the batching of a trained role's passes without gradients; None if they follow the update's plan.

    The token budget is that of a microbatch, as in `role_batching`.

    Raises:
        ConfigError: the values conflict with those inherited from the role's batching.

    >>> from rlpack.config.schema import Actor
    >>> config = Config(actor=Actor(forward_batching=ForwardBatching(max_tokens=16384)))
    >>> forward_batching(config, "actor").max_tokens, forward_batching(config, "critic")
    (16384, None)
    """
    own = own_forward_batching(config, role)
    if own == ForwardBatching():
        return None
    try:
        of_role = config.batching.override(**own_batching(config, role).model_dump())
        return _for_shared_rows(config, role, of_role.override(**own.model_dump()))
    except PackingError as error:
        raise ConfigError([_with_own_keys(config, role, str(error), forward=True)]) from error


def own_forward_batching(config: Config, role: str) -> ForwardBatching:
    """Return the keys that a role sets for its passes without gradients; none for roles that aren't trained."""
    own = {"actor": config.actor.forward_batching, "critic": config.critic.forward_batching}
    return own.get(role, ForwardBatching())


def _for_shared_rows(config: Config, role: str, batching: Batching) -> Batching:
    """Return the batching of microbatches whose tokens the ranks of `cp` share."""
    parallel = role_parallel(config, role)
    chunks = chunks_of(parallel, parallel.cp)
    if batching.share_prompts and chunks > 1:
        key = f"{'actor' if own_parallel(config, role).cp_method is None else role}.parallel.cp_method"
        raise PackingError(
            f"batching.share_prompts=true, but {key}=all_gather cuts each sequence into {chunks} chunks, and sequences "
            f"that share a prompt can't be cut one by one; set batching.share_prompts=false or {key}=ulysses"
        )
    return batching.override(
        max_tokens=None if batching.max_tokens is None else batching.max_tokens * parallel.cp,
        pad_to_multiple=lcm(batching.pad_to_multiple, chunks),
        length_multiple=lcm(batching.length_multiple, chunks),
    )


def _with_own_keys(config: Config, role: str, error: str, *, forward: bool) -> str:
    """Return an error about a role's batching with the sections that set its keys, and a remedy in the role's own."""

    def setting(key: re.Match[str]) -> str:
        return f"{batching_section(config, role, key[1], forward=forward)}.{key[1]}"

    def own(key: re.Match[str]) -> str:
        return f"{role}.forward_batching.{key[1]}" if key[1] in passes else f"{batching_key(role)}.{key[1]}"

    passes = ForwardBatching.model_fields if forward else ()
    problem, semicolon, remedy = error.partition("; ")
    text = f"{_KEY.sub(setting, problem)}{semicolon}{_KEY.sub(own, remedy)}"
    inherited = batching_key(role) if forward else "batching"
    section = f"{role}.forward_batching" if forward else batching_key(role)
    return text if section == inherited else f"{section}, with the values inherited from {inherited}: {text}"


def chunks_of(parallel: Parallel, cp: int) -> int:
    """Return the chunks that each sequence is cut into if `cp` ranks share tokens; 1 if rows are cut regardless."""
    return 2 * cp if cp > 1 and parallel.cp_method == "all_gather" else 1


def runs_packed(config: Config, role: str) -> bool:
    """Return whether a role's model runs packed rows; with cp or tp above 1, padded rows are packed, too."""
    parallel = role_parallel(config, role)
    return role_batching(config, role).mode == "packed" or parallel.cp * parallel.tp > 1


def batching_key(role: str) -> str:
    """Return the key of the section with a role's own batching.

    >>> batching_key("actor"), batching_key("critic"), batching_key("judge")
    ('batching', 'critic.batching', 'roles.judge.batching')
    """
    if role == "actor":
        return "batching"
    return f"{role}.batching" if role in _WITH_SECTIONS else f"roles.{role}.batching"


def batching_section(config: Config, role: str, name: str, *, forward: bool) -> str:
    """Return the section that sets a key of a role's batching: its own, or one that it inherits from.

    Args:
        config: the whole configuration.
        role: the role.
        name: of the key, such as `max_tokens`.
        forward: whether the batching is that of passes without gradients.
    """
    if forward and dict(own_forward_batching(config, role)).get(name) is not None:
        return f"{role}.forward_batching"
    return "batching" if dict(own_batching(config, role)).get(name) is None else batching_key(role)


def own_batching(config: Config, role: str) -> RoleBatching:
    """Return the batching keys that a role sets; none for the actor, whose section is `batching` itself."""
    if role == "actor":
        return RoleBatching()
    own = {
        "critic": config.critic.batching,
        "reference": config.reference.batching,
        "reward_model": config.reward_model.batching,
    }
    return own[role] if role in own else config.roles[role].batching


def role_compute(config: Config, role: str) -> Compute:
    """Return how `role` runs its model: its own settings, and the actor's for those that are null.

    A frozen role recomputes nothing, since it has no backward pass, and has no moments.

    >>> from rlpack.config.schema import Actor, Reference
    >>> config = Config(actor=Actor(precision="bf16", logprob_chunk=64), reference=Reference(logprob_chunk=256))
    >>> role_compute(config, "reference").precision, role_compute(config, "reference").logprob_chunk
    ('bf16', 256)
    """
    sections = {"critic": config.critic, "reference": config.reference, "reward_model": config.reward_model}
    own: RoleCompute | None = sections.get(role)
    keys = set(Compute.model_fields)
    values = config.actor.model_dump(include=keys)
    if own is not None:
        values |= own.model_dump(include=keys, exclude_none=True)
    if role in _FROZEN:
        values["gradient_checkpointing"] = "none"
        values["offload"] = "parameters" if values["offload"] == "parameters" else "none"
    return Compute(**values)


def role_parallel(config: Config, role: str) -> Parallel:
    """Return the sizes that `role` asks for: its own, and the actor's for those that are null.

    >>> from rlpack.config.schema import Actor, Reference
    >>> own = Reference(parallel=RoleParallel(dp_replicate=1))
    >>> config = Config(actor=Actor(parallel=Parallel(dp_replicate=2)), reference=own)
    >>> role_parallel(config, "reference").dp_replicate, role_parallel(config, "critic").dp_replicate
    (1, 2)
    """
    own = own_parallel(config, role).model_dump(exclude_none=True)
    values = config.actor.parallel.model_dump() | own
    if role != "actor" and values["pp"] == 1 and "vpp" not in own:
        values["vpp"] = 1  # the actor's virtual stages are of stages that this role hasn't got
    return Parallel(**values)


def own_parallel(config: Config, role: str) -> RoleParallel:
    """Return the sizes that a role sets; none for the actor, whose section is the default of the others."""
    own = {
        "critic": config.critic.parallel,
        "reference": config.reference.parallel,
        "reward_model": config.reward_model.parallel,
    }
    return own.get(role, RoleParallel())


def pool_of(config: Config, role: str) -> str:
    """Return the pool of `role`: that of placement.roles, else the first one.

    >>> pool_of(Config(), "judge")
    'main'
    """
    return config.placement.roles.get(role, next(iter(config.placement.pools)))


def gpus_per_rank(config: Config, role: str) -> float:
    """Return the GPUs of one rank of `role`; 0 if its pool is not described."""
    pool = config.placement.pools.get(pool_of(config, role))
    return 0.0 if pool is None else pool.gpus_per_rank


def shares_gpus(config: Config) -> bool:
    """Return whether roles that run a model, or roles that users add, share the GPUs of the role rollout."""
    others = (role for role in started_roles(config) if role not in ("rollout", "reward"))
    return gpus_per_rank(config, "rollout") > 0 and pool_of(config, "rollout") in {
        pool_of(config, role) for role in others
    }


def sleep_level(config: Config) -> int:
    """Return the effective `rollout.sleep_level`; 0 if engines never sleep.

    >>> sleep_level(Config())
    0
    """
    # Only recipes that train wake engines; other roles of an evaluation compute nothing meanwhile.
    if config.rollout.engine != "vllm" or not shares_gpus(config) or not recipe_of(config).trains:
        return 0
    return 1 if config.rollout.sleep_level is None else config.rollout.sleep_level


def scores_apart(config: Config) -> bool:
    """Return whether no role scores in the pool of the engines.

    Otherwise, ranks that generate or load weights return scores late, and a failure of scoring takes engines along.
    """
    engines = pool_of(config, "rollout")
    return all(pool_of(config, role) != engines for role in started_roles(config) if scores(config, role))


def started_roles(config: Config) -> list[str]:
    """Return the roles that this run starts, in the order of `roles`; see `RecipeSpec.roles`.

    >>> started_roles(Config())
    ['actor', 'rollout', 'reward']
    """
    spec = recipe_of(config)
    required = dict.fromkeys(spec.starts, True)
    if not spec.generates:
        return [role for role in config.roles if role in required]
    builtin = dict.fromkeys(builtin_roles(), False)
    optional = {"reference": config.algorithm.kl_coef > 0, "reward_model": config.reward_model.path is not None}
    starts = builtin | optional | required
    return [role for role in config.roles if starts.get(role, True)]


def optimizers(config: Config) -> dict[str, Optimizer]:
    """Return the optimizer section of each role that this run trains, by its key.

    >>> list(optimizers(Config()))
    ['actor.optimizer']
    """
    sections = {"actor": config.actor.optimizer, "critic": config.critic.optimizer}
    return {f"{role}.optimizer": sections[role] for role in recipe_of(config).trains if role in sections}


def pools_in_use(config: Config) -> dict[str, Pool]:
    """Return the pools that a run starts processes in, by name.

    >>> list(pools_in_use(Config()))
    ['main']
    """
    names = dict.fromkeys(pool_of(config, role) for role in started_roles(config))
    return {name: config.placement.pools[name] for name in names}


def is_builtin(role: str) -> bool:
    """Return whether `role` is a built-in role."""
    return role in builtin_roles()


def scores(config: Config, role: str) -> bool:
    """Return whether a role scores rollouts: reward functions, the reward model, and roles that users add.

    >>> scores(Config(), "reward"), scores(Config(), "rollout"), scores(Config(), "judge")
    (True, False, True)
    """
    return role in _SCORERS or not (is_builtin(role) or role in recipe_of(config).own_roles)


def longest_known_row(config: Config) -> int | None:
    """Return the tokens of the longest row of a run, None where demonstrations may be longer than rollouts."""
    if not recipe_of(config).generates or config.sft_warmup.steps > 0:
        return None
    return longest_rollout(config)


def longest_planned_row(config: Config) -> int:
    """Return the tokens of the longest row of usual plans: of a rollout, or what a microbatch of the actor holds."""
    return longest_known_row(config) or role_batching(config, "actor").budget


def longest_rollout(config: Config) -> int:
    """Return the most tokens of a prompt and its response together.

    >>> longest_rollout(Config())
    768
    """
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens

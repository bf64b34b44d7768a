"""Rules across keys, beyond the type and limits of a single key.

Every rule is a generator of problems. `broken_rules` runs all of them, so that users see all problems at once. Rules
depend on values only; files, packages and the machine are checked by `rlpack.cli.environment`. Two exceptions: a
missing data file without a validation source is reported here, because it is the first thing to fix, and a tokenizer in
a folder needs no revision.
"""

import os
import re
from collections.abc import Callable, Iterator

from rlpack.config.addresses import address_problems
from rlpack.config.ahead_rules import ahead_problems
from rlpack.config.algorithm_rules import algorithm_problems
from rlpack.config.batching_rules import (
    alignment_problems,
    cut_problems,
    own_batching_problems,
    step_size_problems,
    token_budget_problems,
)
from rlpack.config.compile_rules import compile_problems
from rlpack.config.correction_rules import correction_problems
from rlpack.config.data_rules import data_problems
from rlpack.config.engine_rules import engine_problems
from rlpack.config.evaluation_sets import evaluation_set_problems, key_of, reward_functions, sources
from rlpack.config.expert_rules import expert_problems
from rlpack.config.function_names import function_name_problems
from rlpack.config.json_rules import json_problems
from rlpack.config.layout_rules import layout_problems
from rlpack.config.recipes import recipe_of, recipe_texts
from rlpack.config.redaction import secret_paths
from rlpack.config.reward_rules import deadline_problems, judge_problems, reward_problems
from rlpack.config.roles import (
    optimizers,
    pool_of,
    role_compute,
)
from rlpack.config.schema import Config, Model
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.config.sections.submission import submission_problems

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NO_LORA = Lora()
# Bytes of one component of a path, on all common file systems.
_LONGEST_NAME = 255


def broken_rules(config: Config) -> list[str]:
    """Return the problems across keys of a config whose single values are valid."""
    problems = [problem for rule in _RULES for problem in rule(config)]
    return problems or list(alignment_problems(config)) or list(token_budget_problems(config))


def _recipe(config: Config) -> Iterator[str]:
    yield from recipe_texts(config, "rules")


def _mini_batches(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if not trainer.shuffle_mini_batches:
        return
    size, sequences = trainer.mini_batch_size, trainer.prompts_per_step * trainer.group_size
    key = None
    if trainer.updates_per_batch == 1:
        key = "updates_per_batch is 1"
    elif size is None:
        key = "mini_batch_size is null"
    elif size >= sequences and config.recipe.target.startswith("rlpack."):  # others may train on more rows
        key = f"mini_batch_size is {size}, but a rollout batch has only {sequences} sequences"
    if key is not None:
        yield (
            f"trainer.shuffle_mini_batches is true, but trainer.{key}, so there is nothing to shuffle: set "
            "trainer.updates_per_batch to 2 or more and trainer.mini_batch_size to less than a rollout batch, or "
            "trainer.shuffle_mini_batches=false"
        )


def _optimizer(config: Config) -> Iterator[str]:
    for key, settings in optimizers(config).items():
        yield from _schedule(key, settings, config.trainer.known_steps)
    lora, optimizer = config.actor.lora, config.actor.optimizer
    if lora.rank > 0 and optimizer.freeze:
        yield (
            f"actor.lora.rank is {lora.rank}, which freezes every weight but the adapters, and actor.optimizer.freeze "
            "is set too; set it to [] and choose layers with actor.lora.targets, or set actor.lora.rank=0"
        )
    if lora.rank > 0 and not lora.targets:
        yield 'actor.lora.targets is [], so no layer would get an adapter; set some, or all of them: ["*"]'
    unused = [name for name, value in lora if value != dict(_NO_LORA)[name]] if lora.rank == 0 else []
    if unused:
        yield f"actor.lora.{unused[0]} is set, but actor.lora.rank is 0: there are no adapters; set it, say to 16"


def _offload(config: Config) -> Iterator[str]:
    for key, optimizer in optimizers(config).items():
        role = key.partition(".")[0]
        if optimizer.name == "adamw_8bit" and role_compute(config, role).offload == "optimizer":
            yield (
                f"{role}.offload is optimizer, but {key}.name is adamw_8bit, whose moments can't be moved and take a "
                f"quarter of the memory anyway; set {role}.offload=none or parameters, or {key}.name=adamw"
            )
        if optimizer.name == "adamw_8bit" and config.checkpoint.asynchronous:
            yield (
                f"checkpoint.asynchronous is true, but {key}.name is adamw_8bit, whose moments can't be copied for it; "
                f"set checkpoint.asynchronous=false, or {key}.name=adamw"
            )
    for role, section in (("reference", config.reference), ("reward_model", config.reward_model)):
        if section.offload == "optimizer":
            yield f"{role}.offload is optimizer, but {role} isn't trained; set it to parameters or none"


def _schedule(key: str, optimizer: Optimizer, steps: int | None) -> Iterator[str]:
    if optimizer.schedule == "constant" and optimizer.min_lr_ratio > 0:
        yield (
            f"{key}.min_lr_ratio is {optimizer.min_lr_ratio:g}, but {key}.schedule is constant, which doesn't decay; "
            f"set {key}.schedule=cosine or linear, or leave {key}.min_lr_ratio=0"
        )
    if optimizer.warmup_steps > 1 and not optimizer.warmup_steps.is_integer():
        yield (
            f"{key}.warmup_steps is {optimizer.warmup_steps:g}; it has to be a whole number of steps, or below 1 the "
            "fraction of the recipe's steps"
        )
    elif steps is not None and 0 < steps <= optimizer.warmup_of(steps):
        yield (
            f"{key}.warmup_steps ({optimizer.warmup_steps:g}) leaves no step of trainer.steps ({steps}) at peak rate; "
            f"lower {key}.warmup_steps or raise trainer.steps"
        )


def _object_store(config: Config) -> Iterator[str]:
    placement = config.placement
    yield from address_problems(placement.address)
    if placement.address is not None and placement.object_store_gb is not None:
        yield (
            f"placement.object_store_gb is {placement.object_store_gb:g}, but placement.address joins a cluster that "
            "already has a store; leave it null, and set ray start --object-store-memory"
        )
    size, in_flight = placement.object_store_gb, placement.in_flight_gb
    if placement.address is None and size is not None and in_flight is not None and in_flight > size:
        yield (
            f"placement.in_flight_gb ({in_flight:g}) exceeds placement.object_store_gb ({size:g}); lower "
            "placement.in_flight_gb or raise placement.object_store_gb"
        )


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if model.path is None and not isinstance(model.config.get("model_type"), str):
        yield (
            "model.path is null, so a new model is initialized from model.config, which lacks model_type; "
            "set model.path to a folder or a hub name, choose model=tiny, or set model.config.model_type (qwen2, ...)"
        )
    if model.path is not None and model.config:
        yield (
            f"model.path is {model.path!r}, but model.config is set too, which is for a new model: "
            "choose model=pretrained together with model.path"
        )
    for name, section in (("model", model), ("critic", config.critic), ("reward_model", config.reward_model)):
        if section.revision is not None and section.path is None:
            yield f"{name}.revision is {section.revision!r}, but {name}.path is null; a revision needs a hub model"
    if model.tokenizer_revision is not None and model.tokenizer in (None, model.path):
        yield (
            f"model.tokenizer_revision is {model.tokenizer_revision!r}, but the tokenizer is that of model.path, which "
            "has model.revision; set model.tokenizer to another, or model.tokenizer_revision=null"
        )
    yield from _remote_code(model)


def _remote_code(model: Model) -> Iterator[str]:
    if not model.trust_remote_code:
        return
    if model.path is None or model.revision is None:
        yield (
            "model.trust_remote_code is true, but code from the hub runs only at a pinned commit; "
            "set model.path and model.revision, or set it to false"
        )
    tokenizer = model.tokenizer
    if tokenizer in (None, model.path) or model.tokenizer_revision is not None:
        return
    if not os.path.isdir(os.path.expanduser(tokenizer)):
        yield (
            f"model.trust_remote_code is true, but model.tokenizer, {tokenizer!r}, has no pinned commit; set "
            "model.tokenizer_revision, or set model.trust_remote_code=false"
        )


def _paths(config: Config) -> Iterator[str]:
    """Refuse paths that no file system can hold."""
    data, model = config.data, config.model
    paths = {
        "run_dir": config.run_dir,
        "data.source": data.source,
        "data.validation_source": data.validation_source,
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "critic.path": config.critic.path,
        "reward_model.path": config.reward_model.path,
        **sources(config),
    }
    for key, path in paths.items():
        longest = max(len(os.fsencode(name)) for name in (path or "").split("/"))
        if longest > _LONGEST_NAME:
            yield f"{key} is {path!r}, in which a name has {longest} bytes; a file's name has at most {_LONGEST_NAME}"
        elif "\0" in (path or ""):
            yield f"{key} is {path!r}, which holds a NUL character; remove it"


def _supervision(config: Config) -> Iterator[str]:
    if config.data.completion_column is not None:
        return
    if recipe_of(config).needs_demonstrations:
        yield f"recipe={config.recipe.name} trains on demonstrations; set data.completion_column"
    elif config.sft_warmup.steps > 0:
        yield (
            f"sft_warmup.steps={config.sft_warmup.steps} trains on demonstrations; set data.completion_column, or "
            "sft_warmup.steps=0"
        )


def _targets(config: Config) -> Iterator[str]:
    functions = config.reward.functions
    targets = {f"reward.functions.{name}.function": function.function for name, function in functions.items()}
    targets = targets or {"reward.function": config.reward.function}
    targets |= reward_functions(config)
    targets |= {f"roles.{name}.target": role.target for name, role in config.roles.items()}
    for key, target in targets.items():
        if not _TARGET.fullmatch(target):
            yield f"{key} is {target!r}; it has to be package.module:Name"


def _names(config: Config) -> Iterator[str]:
    for kind, names in (("placement.pools", config.placement.pools), ("roles", config.roles)):
        for name in names:
            if not _NAME.fullmatch(name):
                yield f"{kind} holds the name {name!r}; use letters, digits, - and _, starting with a letter"
    for role in recipe_of(config).starts:
        if role not in config.roles:
            yield f"recipe={config.recipe.name} needs the role {role}; keep roles.{role}"
    if config.reward_model.path is not None and "reward_model" not in config.roles:
        yield f"reward_model.path is {config.reward_model.path!r}, which needs its role; keep roles.reward_model"


def _placement(config: Config) -> Iterator[str]:
    placement = config.placement
    if not placement.pools:
        yield "placement.pools is empty; add one, such as placement.pools.main.ranks=2"
        return
    for role, pool in placement.roles.items():
        if role not in config.roles:
            yield f"placement.roles.{role} names a role that doesn't exist; roles has: {', '.join(config.roles)}"
        if pool not in placement.pools:
            yield f"placement.roles.{role} is {pool!r}; placement.pools has: {', '.join(placement.pools)}"
    used = {pool_of(config, role) for role in config.roles}
    for name, pool in placement.pools.items():
        if name not in used:
            yield f"placement.pools.{name} has no role; assign one in placement.roles, or add ~placement.pools.{name}"
        # NCCL ranks can't share a GPU, and a rank uses only one, unless it is an engine that splits its model.
        roles = [role for role in config.roles if pool_of(config, role) == name]
        splits = config.rollout.engine == "vllm" and roles == ["rollout"] and pool.gpus_per_rank % 1 == 0
        if pool.gpus_per_rank not in (0, 1) and not splits:
            yield (
                f"placement.pools.{name}.gpus_per_rank is {pool.gpus_per_rank}; it has to be 0 or 1, because a rank "
                f"runs on the CPU or on one whole GPU; set placement.pools.{name}.ranks to the number of GPUs. Only a "
                "pool with no role but rollout, with rollout.engine=vllm, may have several, which share the model"
            )


def _run(config: Config) -> Iterator[str]:
    if config.run_dir is not None and not config.run_dir.strip():
        yield "run_dir is blank; set a directory, or null for runs/<date>-<recipe>"
    if config.resume == "auto" and config.run_dir is None:
        yield "resume=auto needs the directory of the run to resume; set run_dir"


def _secrets(config: Config) -> Iterator[str]:
    """Refuse secrets: a config is written to the run directory, the report and the loggers."""
    free = {
        "model.config": config.model.config,
        "data.generator": config.data.generator,
        "algorithm.advantage_arguments": config.algorithm.advantage_arguments,
        "algorithm.loss_arguments": config.algorithm.loss_arguments,
        "rollout.vllm": config.rollout.vllm,
        "reward.arguments": config.reward.arguments,
        **{f"roles.{name}.arguments": role.arguments for name, role in config.roles.items()},
        **{f"reward.functions.{name}.arguments": one.arguments for name, one in config.reward.functions.items()},
        **{f"{key_of(name)}.reward_arguments": one.reward_arguments for name, one in config.evaluation.sets.items()},
    }
    for place, values in free.items():
        for path in secret_paths(place, values):
            # Only the names in users' own functions and classes can be changed.
            rest = ", such as HF_TOKEN" if place == "rollout.vllm" else "; if it is not a secret, rename the key"
            yield (
                f"{path} looks like a secret, and configs are stored and shown; pass it as an environment variable"
                f"{rest}"
            )


def _job(config: Config) -> Iterator[str]:
    yield from submission_problems(config.job)


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _recipe,
    algorithm_problems,
    engine_problems,
    function_name_problems,
    expert_problems,
    compile_problems,
    correction_problems,
    step_size_problems,
    _mini_batches,
    _optimizer,
    _offload,
    _object_store,
    _model,
    _paths,
    data_problems,
    _supervision,
    _run,
    _targets,
    reward_problems,
    evaluation_set_problems,
    judge_problems,
    _names,
    deadline_problems,
    _placement,
    ahead_problems,
    layout_problems,
    own_batching_problems,
    cut_problems,
    json_problems,
    _secrets,
    _job,
)

"""Warnings about configs that are valid but probably a mistake."""

import os
from collections.abc import Collection, Iterator
from typing import Any

from rlpack.config.ahead_rules import ahead_warnings
from rlpack.config.algorithm_warnings import algorithm_warnings
from rlpack.config.batching_warnings import batching_warnings
from rlpack.config.engine_rules import engine_warnings
from rlpack.config.recipes import recipe_of, recipe_texts
from rlpack.config.reward_rules import SERVED_REWARD_MODEL
from rlpack.config.roles import WITH_LAYOUTS, gpus_per_rank, pool_of, role_compute, role_parallel, started_roles
from rlpack.config.schema import Algorithm, Config, Judge, Reference
from rlpack.config.sections.parallelism import Parallel
from rlpack.config.sections.value_models import Critic, RewardModel
from rlpack.installation import RAY_JOB

# Losses that don't read `clip_low` and `clip_high`.
_WITHOUT_CLIPPING = ("reinforce", "sapo", "kl_cov")
# `clip_low` and `clip_high` of the papers, where they differ much from `ppo_clip`'s: the defaults of the functions.
_PAPER_BOUNDS = {"gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4), "cispo": (1.0, 0.28), "dppo_kl": (0.05, 0.05)}
# Keys of `algorithm` that built-in presets set for their own loss and KL term, which a command may replace.
_IN_PRESETS = ("algorithm.clip_low", "algorithm.clip_high", "algorithm.kl_estimator")


def config_warnings(config: Config, given: Collection[str] | None = None) -> list[str]:
    """Return warnings about valid choices that are probably a mistake.

    Args:
        config: a valid configuration.
        given: keys that the command sets, for warnings that don't concern a preset's values; None for all.

    >>> from rlpack.config.schema import Trainer
    >>> config_warnings(Config(trainer=Trainer(group_size=1)))[0].partition(":")[0]
    'trainer.group_size is 1'
    """
    return [
        *recipe_texts(config, "warnings"),
        *ahead_warnings(config),
        *algorithm_warnings(config),
        *batching_warnings(config),
        *engine_warnings(config),
        *_sampling(config),
        *_mini_batches(config, given),
        *_untaught_model(config),
        *_unread_sections(config),
        *_unread_keys(config, given),
        *_unread_settings(config, given),
        *_foreign_bounds(config, given),
        *_unread_correction(config),
        *_unmeasured_lag(config),
        *_unread_layout(config),
        *_unread_revisions(config),
        *_offloading(config),
    ]


def _sampling(config: Config) -> Iterator[str]:
    if recipe_of(config).generates and config.actor.lora.dropout > 0:
        yield (
            f"actor.lora.dropout is {config.actor.lora.dropout:g}: updates drop inputs but rollouts don't, so ratios "
            "differ from 1 from the first update on"
        )


def _mini_batches(config: Config, given: Collection[str] | None) -> Iterator[str]:
    """Yield a warning if mini-batches don't divide a rollout batch, or the command line makes them larger than it."""
    size, sequences = config.trainer.mini_batch_size, config.trainer.prompts_per_step * config.trainer.group_size
    if size is None:
        return
    if size > sequences:
        if given is None or "trainer.mini_batch_size" in given:
            yield (
                f"trainer.mini_batch_size is {size}: a rollout batch has only {sequences} sequences, so it is one step"
            )
    elif rest := sequences % size:
        yield (
            f"trainer.mini_batch_size is {size}: a rollout batch has {sequences} sequences, so the last of its "
            f"optimizer steps has only {rest}"
        )


def _untaught_model(config: Config) -> Iterator[str]:
    """Yield a warning if a new model has to find rewards by chance."""
    is_untaught = config.model.path is None and config.sft_warmup.steps == 0
    # The built-in task's presets have a warm-up, so it is left out on purpose there.
    if recipe_of(config).generates and is_untaught and config.data.source != "arithmetic":
        yield (
            "model.path is null and sft_warmup.steps is 0: a new model's responses are random, so almost none earns a "
            "reward and nothing is learned; start from a pretrained model (model=pretrained model.path=…), or add a "
            "supervised warm-up (sft_warmup.steps=500 data.completion_column=…)"
        )


def _unread_sections(config: Config) -> Iterator[str]:
    roles = started_roles(config)
    if "critic" not in roles and config.critic != Critic():
        yield "critic.* is set but unused without a recipe that starts the critic, such as recipe=ppo"
    if "reference" not in roles and config.reference != Reference():
        yield "reference.* is set but unused without a KL term (algorithm.kl_coef above 0)"
    if "reward_model" not in roles and config.reward_model != RewardModel():
        yield "reward_model.* is set but unused without reward_model.path"
    if any(config.roles[role].target == SERVED_REWARD_MODEL for role in roles):
        for name in ("prompt_template", "max_score", "max_tokens"):
            if getattr(config.judge, name) != getattr(Judge(), name):
                yield f"judge.{name} is set but unused: a reward model reads tokens, and its scores have no maximum"


def _unread_keys(config: Config, given: Collection[str] | None) -> Iterator[str]:
    """Yield keys of `algorithm` that differ from their defaults without effect, and others that the recipe ignores."""
    of_recipe = {key: f"with recipe={config.recipe.name} {why}" for key, why in recipe_of(config).ignores.items()}
    reasons, default = _unread_in(config.algorithm) | of_recipe, dict(Algorithm())
    for name, value in config.algorithm:
        key = f"algorithm.{name}"
        is_of_preset = key in _IN_PRESETS and given is not None and key not in given
        if value != default[name] and key in reasons and not is_of_preset:
            text = f"{value:g}" if isinstance(value, float) else value
            yield f"{key} is {text} but unused: {reasons[key]}"
    for key in sorted(of_recipe.keys() & set(given or ())):  # presets set keys of the other sections for any recipe
        if not key.startswith("algorithm."):
            yield f"{key} is {_value_of(config, key)} but unused: {of_recipe[key]}"


def _unread_settings(config: Config, given: Collection[str] | None) -> Iterator[str]:
    """Yield settings of a job, of W&B and of the judge that the command sets for a run without them."""
    for name in ("env_vars", "pip"):
        is_given = any(f"{key}.".startswith(f"job.{name}.") for key in given or ())
        if getattr(config.job, name) and is_given and RAY_JOB not in os.environ:
            instead = "set the variables in its environment" if name == "env_vars" else "install the packages"
            yield f"job.{name} is set but unused: it is for `rlpack submit`; to run here, {instead}"
    if "logger.wandb_project" in (given or ()) and config.logger.wandb == "disabled":
        yield (
            f"logger.wandb_project is {config.logger.wandb_project} but unused: logger.wandb is disabled; set it to "
            "online or offline"
        )
    if config.judge.url is None and any(key.startswith("judge.") for key in given or ()):
        yield "judge.* is set but unused: judge.url is null"


def _value_of(config: Config, key: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for name in key.split("."):
        value = value[name]
    return value


def _unread_in(algorithm: Algorithm) -> dict[str, str]:
    """Return the keys of `algorithm` that its other keys leave without effect, and why."""
    reasons = {}
    # A user's own functions may take them.
    if algorithm.advantage != "group_relative" and ":" not in algorithm.advantage:
        why = f"algorithm.advantage={algorithm.advantage} doesn't use it"
        reasons |= dict.fromkeys(("algorithm.baseline", "algorithm.scale"), why)
    if algorithm.loss != "ppo_clip" and ":" not in algorithm.loss:
        bounds = ("dual_clip", "clip_low", "clip_high") if algorithm.loss in _WITHOUT_CLIPPING else ("dual_clip",)
        reasons |= {f"algorithm.{name}": f"algorithm.loss={algorithm.loss} doesn't use it" for name in bounds}
    if algorithm.kl_estimator != "k3":
        reasons["algorithm.k3_bound"] = f"algorithm.kl_estimator is {algorithm.kl_estimator}"
    if algorithm.kl_target is None:
        reasons["algorithm.kl_horizon"] = "it needs algorithm.kl_target"
    if algorithm.kl_coef == 0:
        names = ("kl_estimator", "kl_straight_through", "k3_bound")
        reasons |= {f"algorithm.{name}": "algorithm.kl_coef is 0, so there is no KL term" for name in names}
    elif algorithm.kl_placement == "reward":
        reasons["algorithm.kl_straight_through"] = "algorithm.kl_placement is reward, but only a loss has a gradient"
    return reasons


def _foreign_bounds(config: Config, given: Collection[str] | None) -> Iterator[str]:
    """Yield a warning if a command leaves a loss the default bounds, which are those of `ppo_clip`.

    A config doesn't tell which keys its presets set, so a preset is recognized by other bounds.
    """
    algorithm, default = config.algorithm, Algorithm()
    if given is None or algorithm.loss not in _PAPER_BOUNDS or "algorithm.loss" in recipe_of(config).ignores:
        return
    bounds = (default.clip_low, default.clip_high)
    is_set = "algorithm.clip_low" in given or "algorithm.clip_high" in given
    if not is_set and (algorithm.clip_low, algorithm.clip_high) == bounds:
        low, high = _PAPER_BOUNDS[algorithm.loss]
        preset = "" if algorithm.loss == "dppo_kl" else f", or use recipe={algorithm.loss}, which sets its own"
        yield (
            f"algorithm.loss is {algorithm.loss}, but algorithm.clip_low and algorithm.clip_high are {bounds[0]:g} and "
            f"{bounds[1]:g}, the bounds of ppo_clip; set those of the paper "
            f"(algorithm.clip_low={low:g} algorithm.clip_high={high:g}){preset}"
        )


def _unread_correction(config: Config) -> Iterator[str]:
    """Yield keys of `algorithm.correction` that are set without effect."""
    correction, key = config.algorithm.correction, "algorithm.correction"
    given = correction.model_dump(exclude_defaults=True)
    if given and not recipe_of(config).generates:
        yield f"{key}.* is set but unused: recipe={config.recipe.name} samples no responses"
    elif correction.weights == "none":
        for name in ("upper", "lower", "normalize"):
            if name in given:
                value = "true" if name == "normalize" else f"{given[name]:g}"
                yield f"{key}.{name} is {value} but unused: it applies to importance weights; set {key}.weights"


def _unmeasured_lag(config: Config) -> Iterator[str]:
    """Yield a warning if a run with a lead has no metrics of how far its responses' policy is from the trained one."""
    lead, correction, rollout = config.trainer.lead, config.algorithm.correction, config.rollout
    if not lead or not recipe_of(config).generates or correction.measures:
        return
    if rollout.top_k > 0 or rollout.top_p < 1:
        yield (
            f"trainer.lead is {lead}, but rollout.top_k or rollout.top_p filters what is sampled, so its "
            "log-probs can't be compared with the actor's: no metrics mismatch/* show how stale responses are"
        )
    elif correction.bypass:
        yield (
            f"trainer.lead is {lead}, but algorithm.correction.bypass=true uses the sampler's log-probs as "
            "the old ones: then no metrics mismatch/* show how far stale responses are from the policy; set it to "
            "false, or set a limit such as algorithm.correction.warn_above={k3: 0.1}, which measures them"
        )


def _unread_layout(config: Config) -> Iterator[str]:
    """Yield settings of layouts that are set where no role has the layout."""
    roles = [role_parallel(config, role) for role in WITH_LAYOUTS if role in started_roles(config)]
    for name, size in (("sp", "tp"), ("cp_method", "cp")):
        value = dict(config.actor.parallel)[name]
        if value != dict(Parallel())[name] and all(dict(each)[size] == 1 for each in roles):
            yield f"actor.parallel.{name} is {value} but unused: no role has {size} above 1"


def _unread_revisions(config: Config) -> Iterator[str]:
    model, critic = config.model, config.critic
    is_folder = model.path is not None and _is_folder(model.path)
    if model.revision is not None and not model.trust_remote_code and is_folder:
        yield f"model.revision is {model.revision!r} but unused: model.path is a folder"
    if model.tokenizer_revision is not None and model.tokenizer is not None and _is_folder(model.tokenizer):
        yield f"model.tokenizer_revision is {model.tokenizer_revision!r} but unused: model.tokenizer is a folder"
    if critic.revision is not None and critic.path is not None and _is_folder(critic.path):
        yield f"critic.revision is {critic.revision!r} but unused: critic.path is a folder"


def _offloading(config: Config) -> Iterator[str]:
    """Yield roles that are to keep tensors of GPUs in host memory, and have no GPUs."""
    for role in (role for role in WITH_LAYOUTS if role in started_roles(config)):
        offload = role_compute(config, role).offload
        if offload != "none" and gpus_per_rank(config, role) == 0:
            yield (
                f"{role}.offload is {offload}: the pool of {role} ({pool_of(config, role)}) has no GPUs, so weights "
                "and moments are in host memory anyway and no memory is saved"
            )


def _is_folder(path: str) -> bool:
    return os.path.isdir(os.path.expanduser(path))  # false for a name that no file can have

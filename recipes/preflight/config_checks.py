"""Preflight checks on the driver: failing here takes seconds, failing on a rank takes minutes.

Each check builds or calls what a rank would build or call, so that the error is the one that the rank would raise.
"""

import copy
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.algorithms.policy_loss import PolicyTokens
from rlpack.algorithms.registry import find_advantage
from rlpack.batch.errors import DataError
from rlpack.config.recipes import RecipeSpec, recipe_of
from rlpack.config.reward_rules import JUDGE
from rlpack.config.roles import is_builtin, role_batching, started_roles
from rlpack.config.schema import Config, Model, builtin_roles
from rlpack.data.prompts import Prompts
from rlpack.data.tokenization import eos_id, pad_id, tokenizer_name
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.loading import build_meta_model, check_classifier, check_same_tokenizer
from rlpack.models.optimizers import freeze
from rlpack.packing import Batching
from rlpack.recipes.preflight.resource_checks import check_resources
from rlpack.recipes.preflight.role_checks import check_role
from rlpack.rewards.errors import RewardError
from rlpack.rewards.judge_client import check_prompt_template
from rlpack.rewards.pool.sandbox import why_not_strict
from rlpack.rewards.signatures import check_signature, resolve
from rlpack.workers.build import set_trained_weights
from rlpack.workers.judge import api_key
from rlpack.workers.loss import PolicyGradientLoss
from rlpack.workers.reward import function_specs

# Demonstrations that are tokenized at a time.
_CHUNK_ROWS = 1024
# Per-row columns that an advantage function can name, whichever roles are started.
_ROW_COLUMNS = ("rewards", "valid", "group_ids", "response_tokens", "response_lengths", "prompt_lengths")


def check_before_start(
    config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, held_out: Prompts
) -> PreTrainedModel:
    """Raise on mistakes that would otherwise stop a rank; return the model without weights.

    Raises:
        ModelError: `model` describes no language model that fits the tokenizer, or `actor` or `critic` names weights or
            layers that the model doesn't have.
        AlgorithmError: the loss or the advantage function doesn't exist, or can't be called with its arguments.
        PlacementError: a role's class can't be loaded, built or called, or this machine is too small for the pools.
        RewardError: a reward function doesn't exist, can't be called with the dataset's columns, or can't be confined
            as configured.
        DataError: a row used for training or evaluation has no demonstration or one over the token budget, or the
            tokenizer has no token that ends a response.
    """
    model = build_meta_model(config.model, vocab_size=len(tokenizer))
    spec = recipe_of(config)
    if spec.generates:
        _check_end_of_sequence(config, tokenizer)
    names = started_roles(config)
    _check_weight_patterns(config, model, tokenizer)
    for name in names:
        check_role(name, config.roles[name], is_own=name in spec.own_roles, is_trained=name in spec.trains)
    if any(config.roles[name].target == JUDGE for name in names):
        _check_judge(config, prompts, held_out)
    if "reward" in names:
        _check_reward(config, prompts, held_out)
    if "reward_model" in names:
        check_classifier(config.reward_model, tokenizer)
    check_resources(config)
    if spec.generates:
        _check_algorithm(config, spec)
    batching = role_batching(config, "actor")
    if spec.needs_demonstrations or config.sft_warmup.steps > 0:
        _check_demonstrations(prompts, tokenizer, batching)
    if spec.needs_demonstrations:
        _check_demonstrations(held_out, tokenizer, batching)
    return model


def _check_end_of_sequence(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless some token can end a response."""
    pad_id(tokenizer)
    if eos_id(tokenizer) is None and not config.rollout.stop_token_ids:
        raise DataError(
            f"{tokenizer_name(tokenizer)} has no end-of-sequence token (eos_token), so every response would run "
            f"to rollout.max_new_tokens={config.rollout.max_new_tokens}; set rollout.stop_token_ids to ids that end a "
            "response, or model.tokenizer to a tokenizer that has the token"
        )


def _check_weight_patterns(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless the critic's model exists, and every pattern of weight names matches a weight of its model."""
    set_trained_weights(copy.deepcopy(model), config.actor, seed=config.seed)
    if "critic" in started_roles(config):
        initial = copy.deepcopy(model)
        if (path := config.critic.path) is not None:
            initial = build_meta_model(
                Model(path=path, revision=config.critic.revision), vocab_size=len(tokenizer), key="critic.path"
            )
            way_out = "leave critic.path=null, or choose a model of the policy's family"
            check_same_tokenizer(path, config.critic.revision, tokenizer, key="critic.path", way_out=way_out)
        critic = ScalarHeadModel(cast(PreTrainedModel, initial.base_model))
        freeze(critic.pattern_root, config.critic.optimizer, "critic.optimizer")


def _check_algorithm(config: Config, spec: RecipeSpec) -> None:
    """Find the loss and the advantage function, and call the loss to check its bounds."""
    settings = config.algorithm
    column, mask = torch.zeros(1), torch.ones(1, dtype=torch.bool)
    tokens = PolicyTokens(column, column, column, mask, torch.ones(1, dtype=torch.int64))
    PolicyGradientLoss(settings, temperature=config.rollout.temperature).evaluate(tokens)
    custom = [
        name for name in started_roles(config) if not is_builtin(name)
    ]  # may add any column that the advantage function names
    if "algorithm.advantage" not in spec.ignores and not custom:
        added = [f"reward_{name}" for name in config.reward.functions]
        scorers = [name for name in ("reward", "reward_model") if name in started_roles(config)]
        added += [f"rewards_of_{name}" for name in scorers if len(scorers) > 1]
        added += spec.advantage_columns
        added += ["kl_sum"] if "reference" in started_roles(config) else []
        find_advantage(settings.advantage, settings.advantage_arguments, {*_ROW_COLUMNS, *added, *dict(settings)})


def _check_reward(config: Config, prompts: Prompts, held_out: Prompts) -> None:
    """Raise unless the reward functions exist and take the columns that the reward role passes."""
    is_custom = (
        config.roles["reward"].target != builtin_roles()["reward"].target
    )  # a custom role may call the functions in other ways
    for spec in function_specs(config.reward).values():
        function = resolve(spec.target, spec.key)
        for split in () if is_custom else (prompts, held_out):
            columns = ("uid", "answer", "finish_reason", *split.examples[0].columns)
            check_signature(function, columns, spec.arguments, spec.key.removesuffix("function") + "arguments")
    if is_custom or config.placement.address is not None:  # ranks on another machine check its kernel
        return
    if config.reward.sandbox == "strict" and (reason := why_not_strict()):
        raise RewardError(
            f"reward.sandbox=strict is not available on this machine: {reason}; set reward.sandbox=limits, which "
            "leaves the network and files open to reward functions"
        )


def _check_judge(config: Config, prompts: Prompts, held_out: Prompts) -> None:
    """Raise unless the columns of the judge's prompt_template exist, and its API key is set."""
    for split in (prompts, held_out):
        check_prompt_template(config.judge.prompt_template, ("uid", "answer", *split.examples[0].columns))
    if config.placement.address is None:  # ranks on another machine check its environment
        api_key(config.judge)


def _check_demonstrations(prompts: Prompts, tokenizer: PreTrainedTokenizerBase, batching: Batching) -> None:
    """Tokenize every demonstration once, and raise on one that exceeds the token budget."""
    multiple = batching.pad_to_multiple if batching.mode == "packed" else batching.length_multiple
    for start in range(0, len(prompts), _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, len(prompts)))
        lengths = prompts.demonstrations(rows, tokenizer)["input_ids"].lengths.numpy()
        if batching.overlong != "error" or batching.max_tokens is None:
            continue
        slots = -(-lengths // multiple) * multiple
        for row in np.flatnonzero(slots > batching.max_tokens)[:1]:
            raise DataError(
                f"prompt {prompts.examples[start + row].uid!r} and its demonstration have {lengths[row]} tokens, which "
                f"exceeds batching.max_tokens={batching.max_tokens}; raise it, remove the row, or set "
                "batching.overlong=truncate"
            )

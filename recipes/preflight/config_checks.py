"""What is looked at on the driver before any process starts: the same slip, found by a rank, costs minutes."""

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
from rlpack.data.tokenisation import eos_id, pad_id, tokenizer_name
from rlpack.models.heads import TokenHead
from rlpack.models.loading import check_classifier, check_same_tokens, outline
from rlpack.models.optimizers import freeze
from rlpack.packing import Batching
from rlpack.recipes.preflight.resource_checks import check_machine
from rlpack.recipes.preflight.role_checks import check_role
from rlpack.rewards.errors import RewardError
from rlpack.rewards.judge_client import check_prompt_template
from rlpack.rewards.pool.sandbox import why_not_strict
from rlpack.rewards.signatures import check_signature, resolve
from rlpack.workers.build import set_trained_weights
from rlpack.workers.judge import api_key
from rlpack.workers.loss import PolicyGradientLoss
from rlpack.workers.reward import function_specs

_ROWS_AT_A_TIME = 1024
# Columns of rows that an advantage function can ask for, whatever roles there are.
_ROW_COLUMNS = ("rewards", "valid", "group_ids", "response_tokens", "response_lengths", "prompt_lengths")


def check_before_start(
    config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, held_out: Prompts
) -> PreTrainedModel:
    """Find what would stop a rank while it starts, or a supervised step hours later; return the model's outline.

    Raises:
        ModelError: `model` describes no language model that the tokenizer fits, or `actor` or `critic` names weights or
            layers that theirs doesn't have.
        AlgorithmError: there is no such loss or advantage function, or it can't be called with its arguments.
        PlacementError: a role's class can't be loaded, or is none that a session can build and call, or this machine
            is too small for the pools.
        RewardError: there is no such reward function, it can't be called with the dataset's columns, or it can't be
            confined as it should.
        DataError: a row that is trained or evaluated on has no demonstration, or one over the token budget; the
            tokenizer has no token that ends a response.
    """
    model = outline(config.model, vocab_size=len(tokenizer))
    spec = recipe_of(config)
    if spec.generates:
        _check_ends(config, tokenizer)
    names = started_roles(config)
    _check_trained(config, model, tokenizer)
    for name in names:
        check_role(name, config.roles[name])
    if any(config.roles[name].target == JUDGE for name in names):
        _check_judge(config, prompts, held_out)
    if "reward" in names:
        _check_reward(config, prompts, held_out)
    if "reward_model" in names:
        check_classifier(config.reward_model, tokenizer)
    check_machine(config)
    if spec.generates:
        _check_algorithm(config, spec)
    batching = role_batching(config, "actor")
    if spec.needs_demonstrations or config.sft_warmup.steps > 0:
        _check_demonstrations(prompts, tokenizer, batching)
    if spec.needs_demonstrations:
        _check_demonstrations(held_out, tokenizer, batching)
    return model


def _check_ends(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """See that a response can end; slots without a token need no padding token (`rlpack.data.tokenisation.pad_id`)."""
    pad_id(tokenizer)
    if eos_id(tokenizer) is None and not config.rollout.stop_token_ids:
        raise DataError(
            f"{tokenizer_name(tokenizer)} has no end-of-sequence token (eos_token), so the role rollout could end no "
            f"response before rollout.max_new_tokens={config.rollout.max_new_tokens}; set rollout.stop_token_ids to "
            "ids that end one, or model.tokenizer to a tokenizer that has it"
        )


def _check_trained(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """See that there is a model for the critic, and that patterns name weights of what they are over."""
    set_trained_weights(copy.deepcopy(model), config.actor, seed=config.seed)
    if "critic" in started_roles(config):
        begun = copy.deepcopy(model)
        if (path := config.critic.path) is not None:
            begun = outline(
                Model(path=path, revision=config.critic.revision), vocab_size=len(tokenizer), key="critic.path"
            )
            way_out = "leave critic.path=null, or take a model of the policy's family"
            check_same_tokens(path, config.critic.revision, tokenizer, key="critic.path", way_out=way_out)
        critic = TokenHead(cast(PreTrainedModel, begun.base_model))
        freeze(critic.pattern_root, config.critic.optimizer, "critic.optimizer")


def _check_algorithm(config: Config, spec: RecipeSpec) -> None:
    """Find the loss and the advantage function, and call the loss once, so that a bound outside its range is said."""
    settings = config.algorithm
    column, mask = torch.zeros(1), torch.ones(1, dtype=torch.bool)
    tokens = PolicyTokens(column, column, column, mask, torch.ones(1, dtype=torch.int64))
    PolicyGradientLoss(settings, temperature=config.rollout.temperature).evaluate(tokens)
    own = [name for name in started_roles(config) if not is_builtin(name)]  # such a role may add what it asks for
    if "algorithm.advantage" not in spec.ignores and not own:
        added = [f"reward_{name}" for name in config.reward.functions]
        scorers = [name for name in ("reward", "reward_model") if name in started_roles(config)]
        added += [f"rewards_of_{name}" for name in scorers if len(scorers) > 1]
        added += spec.advantage_columns
        added += ["kl_sum"] if "reference" in started_roles(config) else []
        find_advantage(settings.advantage, settings.advantage_arguments, {*_ROW_COLUMNS, *added, *dict(settings)})


def _check_reward(config: Config, prompts: Prompts, held_out: Prompts) -> None:
    """Find the reward functions and see that they take what the pool of workers/reward.py will call them with."""
    own = config.roles["reward"].target != builtin_roles()["reward"].target  # which may call them otherwise
    for spec in function_specs(config.reward).values():
        function = resolve(spec.target, spec.key)
        for split in () if own else (prompts, held_out):
            columns = ("uid", "answer", "finish_reason", *split.examples[0].columns)
            check_signature(function, columns, spec.arguments, spec.key.removesuffix("function") + "arguments")
    if own or config.placement.address is not None:  # another machine's kernel is asked when its ranks start
        return
    if config.reward.sandbox == "strict" and (reason := why_not_strict()):
        raise RewardError(
            f"reward.sandbox=strict can't be had on this machine: {reason}; set reward.sandbox=limits, which leaves "
            "the network and files open to reward functions"
        )


def _check_judge(config: Config, prompts: Prompts, held_out: Prompts) -> None:
    """See that the judge's prompt_template name columns that are there, and that its key is where it should be."""
    for split in (prompts, held_out):
        check_prompt_template(config.judge.prompt_template, ("uid", "answer", *split.examples[0].columns))
    if config.placement.address is None:  # another machine's environment is asked when its ranks start
        api_key(config.judge)


def _check_demonstrations(prompts: Prompts, tokenizer: PreTrainedTokenizerBase, batching: Batching) -> None:
    """Read every demonstration once, a part of the rows at a time."""
    multiple = batching.pad_to_multiple if batching.mode == "packed" else batching.length_multiple
    for start in range(0, len(prompts), _ROWS_AT_A_TIME):
        rows = np.arange(start, min(start + _ROWS_AT_A_TIME, len(prompts)))
        lengths = prompts.demonstrations(rows, tokenizer)["input_ids"].lengths.numpy()
        if batching.overlong != "error" or batching.max_tokens is None:
            continue
        slots = -(-lengths // multiple) * multiple
        for row in np.flatnonzero(slots > batching.max_tokens)[:1]:
            raise DataError(
                f"prompt {prompts.examples[start + row].uid!r} and its demonstration have {lengths[row]} tokens, over "
                f"batching.max_tokens={batching.max_tokens}; raise it, leave the row out, or set "
                "batching.overlong=truncate"
            )

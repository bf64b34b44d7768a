"""Preflight checks on the driver: failing here takes seconds, failing on a rank takes minutes.

Each check builds or calls what a rank would build or call, so that it raises the same error as the rank would.
"""

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.config.evaluation_sets import naming, set_configs
from rlpack.config.layout_remedies import cp_for
from rlpack.config.recipes import recipe_of
from rlpack.config.reward_rules import CALLS_SERVER, JUDGE
from rlpack.config.roles import calls_reward_functions, forward_batching, role_batching, started_roles
from rlpack.config.schema import Config, Model
from rlpack.data.examples import check_demonstration_length, overlong_demonstration_error
from rlpack.data.prompts import Prompts
from rlpack.data.tokenization import longest_token, pad_id, tokenizer_name
from rlpack.models.errors import ModelError, no_end_problem
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.loading import (
    build_meta_classifier,
    build_meta_model,
    check_classifier,
    check_same_tokenizer,
    linear_head,
)
from rlpack.models.optimizers import freeze
from rlpack.models.packed import language_model
from rlpack.models.quantized import check_quantization
from rlpack.models.rope import check_positions, check_row_length
from rlpack.models.stop_tokens import stop_token_ids
from rlpack.models.stored_weights import check_weight_files
from rlpack.models.vocabulary import input_embedding
from rlpack.packing import Batching
from rlpack.recipes.preflight.algorithm_checks import check_algorithm
from rlpack.recipes.preflight.architecture_checks import (
    check_architecture,
    check_engine,
    check_expert_sizes,
    check_own_model,
    check_rollout_length,
)
from rlpack.recipes.preflight.length_warnings import length_warnings
from rlpack.recipes.preflight.resource_checks import check_resources
from rlpack.recipes.preflight.role_checks import check_role
from rlpack.recipes.preflight.template_warnings import template_warnings
from rlpack.rewards.errors import RewardError
from rlpack.rewards.judge_client import check_prompt_template
from rlpack.rewards.pool.sandbox import why_not_strict
from rlpack.rewards.score_requests import api_key
from rlpack.startup.answer_checks import answer_warnings
from rlpack.startup.dataset_checks import answer_columns, check_enough_rows, check_reward_columns, check_stop_ids
from rlpack.workers.build import set_trained_weights

logger = logging.getLogger(__name__)

# Demonstrations that are tokenized at a time.
_CHUNK_ROWS = 1024


def check_before_start(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    held_out: Prompts,
    sets: Mapping[str, Prompts] = MappingProxyType({}),
) -> PreTrainedModel:
    """Raise on mistakes that would otherwise stop a rank; return the model without weights.

    Args:
        config: the whole configuration.
        tokenizer: the policy's.
        prompts: training prompts.
        held_out: held-out prompts.
        sets: prompts of `evaluation.sets` by name.

    Raises:
        ModelError: `model` describes no language model that fits the tokenizer, its architecture can't be trained as
            configured, `actor` or `critic` names weights or layers that the model doesn't have, or the tokenizer has no
            token that ends a response.
        AlgorithmError: the loss or the advantage function doesn't exist, or can't be called with its arguments.
        PlacementError: a role's class can't be loaded, built or called, or this machine is too small for the pools.
        RewardError: a reward function doesn't exist, can't be called with the dataset's columns, or can't be confined
            as configured.
        DataError: a row used for training or evaluation has no demonstration or one over the token budget.
    """
    model = build_meta_model(config.model, vocab_size=len(tokenizer), pad_token_id=pad_id(tokenizer))
    if config.model.path is not None:
        check_weight_files(model, config.model.path, "model.path")
    check_architecture(config, model)
    spec = recipe_of(config)
    if spec.generates:
        _check_end_of_sequence(config, tokenizer, model)
    _warn_of_prompts(config, tokenizer, model, (prompts, held_out, *sets.values()))
    names = started_roles(config)
    _check_weight_patterns(config, model, tokenizer)
    for name in names:
        check_role(name, config.roles[name], is_own=name in spec.own_roles, is_trained=name in spec.trains)
    _check_judge(config, names, prompts, held_out)
    if "reward" in names:
        _check_reward(config, prompts, held_out)
        _warn_of_unset_variables(config)
    if "reward_model" in names:
        _check_reward_model(config, tokenizer)
    check_resources(config)
    if spec.generates:
        check_algorithm(config)
    if spec.needs_demonstrations or config.sft_warmup.steps > 0:
        _check_demonstrations(config, prompts, tokenizer, role_batching(config, "actor"), model)
    if spec.needs_demonstrations:
        _check_held_out_demonstrations(config, tokenizer, held_out, model)
    check_enough_rows(config, len(prompts))
    _check_sets(config, tokenizer, sets, model)
    return model


def _check_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, Prompts], model: PreTrainedModel
) -> None:
    """Check the prompts of evaluation sets, and the columns that score them."""
    for name, prompts in sets.items():
        of_set = set_configs(config)[name]
        names = started_roles(of_set)
        with naming(config, name):
            _check_judge(of_set, names, prompts)
            if "reward" in names:
                _check_reward(of_set, prompts)
            if recipe_of(of_set).needs_demonstrations:
                _check_held_out_demonstrations(of_set, tokenizer, prompts, model)


def check_before_evaluation(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> None:
    """Raise on mistakes that would otherwise stop a rank of `rlpack evaluate`.

    Raises:
        ModelError: `model.path` is not a language model that fits the tokenizer and the longest response, or that the
            engine can run; or the tokenizer has no token that ends a response.
        PlacementError: a role's class can't be loaded, built or called, or this machine is too small for the pools.
        RewardError: as for a run.
    """
    model = build_meta_model(config.model, vocab_size=len(tokenizer), pad_token_id=pad_id(tokenizer))
    if config.model.path is not None:
        if config.rollout.engine == "hf":
            check_quantization(model.config, f"model.path ({config.model.path!r})")
        check_weight_files(model, config.model.path, "model.path")
    check_engine(config, model)
    check_rollout_length(config, model)
    if config.rollout.engine == "hf":  # computes in fp32
        check_expert_sizes(config, model, ())
    _check_end_of_sequence(config, tokenizer, model)
    _warn_of_prompts(config, tokenizer, model, [prompts])
    for name in started_roles(config):
        check_role(name, config.roles[name], is_own=False, is_trained=False)
    _check_reward(config, prompts)
    _warn_of_unset_variables(config)
    check_resources(config)


def _warn_of_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, splits: Sequence[Prompts]
) -> None:
    """Warn of prompts that are too long for the model, or lack its template; of the template, in the first split."""
    lengths = length_warnings(config, model, splits) if recipe_of(config).generates else []
    for warning in (*lengths, *template_warnings(config, tokenizer, splits[0])):
        logger.warning("%s", warning)


def _check_reward_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless the reward model is a classifier for the policy's tokens, with all its weights, that can be run."""
    classifier = check_classifier(config.reward_model, tokenizer)
    assert config.reward_model.path is not None
    model = build_meta_classifier(classifier, config.reward_model.path)
    linear_head(model)
    check_weight_files(model, config.reward_model.path, "reward_model.path")
    check_own_model(config, "reward_model", model, len(tokenizer))


def _check_end_of_sequence(config: Config, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise unless some token can end a response, and the model can sample it."""
    pad_id(tokenizer)
    num_tokens = input_embedding(model).num_embeddings
    check_stop_ids(config, num_tokens)
    if not any(token < num_tokens for token in stop_token_ids(config, tokenizer)):
        raise ModelError(no_end_problem(tokenizer_name(tokenizer), config.rollout.max_new_tokens))


def _check_weight_patterns(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless the critic's model can be run, and every pattern of weight names matches a weight of its model."""
    set_trained_weights(copy.deepcopy(model), config.actor, seed=config.seed)
    if "critic" in started_roles(config):
        initial = copy.deepcopy(model)
        if (path := config.critic.path) is not None:
            initial = build_meta_model(Model(path=path, revision=config.critic.revision), key="critic.path")
            check_same_tokenizer(path, config.critic.revision, tokenizer, key="critic.path")
            check_weight_files(initial, path, "critic.path")
            check_own_model(config, "critic", initial, len(tokenizer))
        critic = ScalarHeadModel(language_model(initial))
        freeze(critic.pattern_root, config.critic.optimizer, "critic.optimizer")


def _check_reward(config: Config, *splits: Prompts) -> None:
    """Raise unless the reward functions exist and take the columns that the reward role passes."""
    for split in splits:
        check_reward_columns(config, split.examples)
        for warning in answer_warnings(config, split.examples, "the dataset"):
            logger.warning("%s", warning)
    is_custom = not calls_reward_functions(config)
    if is_custom or config.placement.address is not None:  # ranks on another machine check its kernel
        return
    if config.reward.sandbox == "strict" and (reason := why_not_strict(processes=config.reward.subprocesses > 0)):
        raise RewardError(
            f"reward.sandbox=strict is not available on this machine: {reason}; set reward.sandbox=limits, which "
            "leaves the network open to reward functions"
        )


def _warn_of_unset_variables(config: Config) -> None:
    """Warn about names in reward.env_vars that are not set on this machine."""
    unset = [name for name in config.reward.env_vars if name not in os.environ]
    if unset and config.placement.address is None:
        logger.warning(
            "reward.env_vars: no variable %s is set here, so reward functions won't see it; set it before the start, "
            "or remove it from the list",
            " or ".join(unset),
        )


def _check_judge(config: Config, roles: Sequence[str], *splits: Prompts) -> None:
    """Raise unless the columns of the judge's prompt_template exist, and the API key of its server is set."""
    targets = {config.roles[role].target for role in roles}
    for split in splits if JUDGE in targets else ():
        check_prompt_template(config.judge.prompt_template, ("uid", *answer_columns(config), *split.column_names))
    if targets & set(CALLS_SERVER) and config.placement.address is None:  # ranks elsewhere check their environment
        api_key(config.judge.api_key_env)


def _check_held_out_demonstrations(
    config: Config, tokenizer: PreTrainedTokenizerBase, held_out: Prompts, model: PreTrainedModel
) -> None:
    """Check the demonstrations of evaluations, whose passes may have a separate token budget."""
    forward = forward_batching(config, "actor")
    if forward is None:
        _check_demonstrations(config, held_out, tokenizer, role_batching(config, "actor"), model)
    else:
        _check_demonstrations(config, held_out, tokenizer, forward, model, "actor.forward_batching")


def _check_demonstrations(
    config: Config,
    prompts: Prompts,
    tokenizer: PreTrainedTokenizerBase,
    batching: Batching,
    model: PreTrainedModel,
    section: str = "batching",
) -> None:
    """Tokenize every demonstration, and raise on one that exceeds the section's budget or the model's positions."""
    if batching.overlong == "error" and batching.max_tokens is not None:
        longest_in_vocabulary = longest_token(tokenizer)
        for example in prompts.examples:  # megabytes would take a tokenizer minutes
            check_demonstration_length(example, batching.max_tokens, longest_in_vocabulary, section)
    multiple = batching.pad_to_multiple if batching.mode == "packed" else batching.length_multiple
    for start in range(0, len(prompts), _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, len(prompts)))
        lengths = prompts.demonstrations(rows, tokenizer)["input_ids"].lengths.numpy()
        longest = int(min(lengths.max(), batching.max_tokens or lengths.max()))
        source = f"the longest of the demonstrations {start} to {start + len(rows) - 1}"
        check_row_length(model.config, longest, source)
        check_positions(model, longest, source)
        if batching.overlong != "error" or batching.max_tokens is None:
            continue
        slots = -(-lengths // multiple) * multiple
        for row in np.flatnonzero(slots > batching.max_tokens)[:1]:
            example = prompts.examples[start + row]
            cp = cp_for(config, "actor", int(lengths[row]), forward=section != "batching")
            raise overlong_demonstration_error(example, lengths[row], batching.max_tokens, section, cp)

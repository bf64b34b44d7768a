"""All checks that need neither PyTorch nor a cluster."""

import os

from rlpack.config.schema import Config
from rlpack.data.hub import ask_hub
from rlpack.startup.dataset_checks import check_datasets, hub_datasets
from rlpack.startup.function_sources import check_function_sources
from rlpack.startup.model_files import check_model_files, hub_models
from rlpack.startup.model_settings import check_model_settings
from rlpack.startup.pool_checks import check_cluster, check_machine, most_gpus
from rlpack.startup.reward_function_sources import check_reward_sources
from rlpack.startup.role_sources import check_role_sources
from rlpack.startup.same_run import check_resumed
from rlpack.startup.weight_patterns import check_weight_patterns


def check_first(config: Config, *, starts: bool = True) -> None:
    """Raise on a mistake that is found without importing PyTorch; the cheapest checks come first.

    Args:
        config: the configuration.
        starts: whether the run starts here; otherwise neither this machine nor a cluster has to hold its pools.

    Raises:
        ConfigError: a resumed run differs from its checkpoint, or there are too few prompts.
        PlacementError: this machine is too small for the pools, no cluster answers, or a role's class lacks a method.
        AlgorithmError: the loss or the advantage function doesn't exist, or can't be called with its arguments.
        DataError: a source can't be read, or a row is invalid.
        RewardError: a reward function or a judge can't be called with the dataset's columns.
        ModelError: the folder of a model or tokenizer is incomplete or damaged, transformers can't build the model, or
            a pattern matches none of its weights.
    """
    if starts:
        check_machine(config, most_gpus())
        check_cluster(config)
    check_resumed(config)
    check_role_sources(config)
    check_function_sources(config)
    ask_hub([*hub_models(config), *hub_datasets(config)])  # all at once: each may take until the deadline
    check_model_files(config)
    check_model_settings(config)
    check_weight_patterns(config)
    check_datasets(config)


def check_new_model(config: Config) -> None:
    """Raise on settings of a new model, or patterns of its weights, that are certainly wrong.

    Nothing is checked if a model has an absolute path: a job finds another folder there.

    Raises:
        ModelError: transformers can't build the model, or a pattern matches none of its weights.
    """
    paths = (config.model.path, config.critic.path, config.reward_model.path)
    if not any(path is not None and os.path.isabs(os.path.expanduser(path)) for path in paths):
        check_model_settings(config)
        check_weight_patterns(config)


def check_uploaded(config: Config) -> None:
    """Raise on a mistake in the files that are uploaded with a job; users' modules are not imported.

    Args:
        config: the configuration; relative paths are those in the working directory.

    Raises:
        AlgorithmError: see `check_first`.
        ConfigError: see `check_first`.
        DataError: see `check_first`.
        PlacementError: a role's class lacks a method.
        RewardError: see `check_first`.
    """
    check_role_sources(config)
    check_function_sources(config)
    check_reward_sources(config)
    check_datasets(config, is_job=True)

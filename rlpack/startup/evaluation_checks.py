"""The checks of `rlpack evaluate` that need neither PyTorch nor a cluster."""

import os
from pathlib import Path

from rlpack.batch.errors import DataError
from rlpack.config.schema import Config
from rlpack.data.datasets import local_path
from rlpack.data.hub import ask_hub
from rlpack.models.errors import ModelError
from rlpack.startup.dataset_checks import check_held_out, hub_datasets
from rlpack.startup.model_files import TOKENIZER_FILES, check_model_files, hub_models
from rlpack.startup.model_settings import check_model_settings
from rlpack.startup.pool_checks import check_cluster, check_machine, most_gpus
from rlpack.startup.role_sources import check_role_sources


def check_evaluation(config: Config, run: Config | None) -> None:
    """Raise on a mistake that is found without importing PyTorch; the cheapest checks come first.

    Args:
        config: configuration of the evaluation.
        run: what a checkpoint's policy was built with; None for a model.

    Raises:
        PlacementError: this machine is too small for the pools, no cluster answers, or a role's class lacks a method.
        DataError: the source can't be read, or a row is invalid.
        RewardError: a reward function can't be called with the dataset's columns.
        ModelError: the folder of the model, or of a run's base model, is incomplete or damaged, or isn't loaded.
    """
    if config.rollout.vllm.get("load_format") == "dummy":
        raise ModelError(
            "rollout.vllm.load_format is 'dummy', with which vLLM samples from random weights; leave it out, since an "
            "evaluation publishes no others"
        )
    check_machine(config, most_gpus())
    check_cluster(config)
    check_role_sources(config)
    models = config if run is None else run
    ask_hub([*hub_models(models), *hub_datasets(config)])
    if run is None:
        check_model_files(config)
    else:
        _check_models_of_run(run)
    check_model_settings(models)
    if run is None:
        _check_tokenizer(config)
    check_held_out(config)


def _check_models_of_run(run: Config) -> None:
    """Check the model and the tokenizer of a run, which an evaluation can't set."""
    try:
        check_model_files(run)
    except ModelError as error:
        named = {"model.path": run.model.path, "model.tokenizer": run.model.tokenizer}
        paths = {key: os.path.expanduser(source) for key, source in named.items() if source is not None}
        missing = [key for key, path in paths.items() if not os.path.exists(path)]
        if not missing:
            raise
        if os.path.isabs(paths[missing[0]]):
            raise ModelError(
                f"the run's {missing[0]} is {named[missing[0]]!r}, which is not a folder any more; move it back or "
                "link it there, or, once the run has finished, evaluate the folder model in its directory"
            ) from error
        raise ModelError(
            f"{error}. {named[missing[0]]!r} comes from the run's configuration; if it is a folder, it is relative to "
            "the directory where the run was started: run the command there"
        ) from error


def check_path_of_run(source: str) -> None:
    """Raise if the run's path to its held-out prompts doesn't exist in the working directory.

    Raises:
        DataError: names the path and where it starts.
    """
    if source == "arithmetic":
        return
    try:
        local_path(source)
    except DataError as error:
        if os.path.isabs(os.path.expanduser(source)):
            raise
        raise DataError(
            f"{error}; {source} comes from the run's configuration and is relative to the directory where the run was "
            "started: run the command there, or set data.source to the prompts to evaluate on"
        ) from error


def _check_tokenizer(config: Config) -> None:
    """Raise if the model's folder has no tokenizer and none is named."""
    folder = Path(os.path.expanduser(config.model.path or ""))
    if config.model.tokenizer is None and folder.is_dir():
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            return
        raise ModelError(
            f"model.path is {config.model.path!r}, but there is no tokenizer in it (none of "
            f"{', '.join(TOKENIZER_FILES)}); copy it into the folder, or set model.tokenizer"
        )

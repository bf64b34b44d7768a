"""Warn if an evaluation reads other prompts than its run held out, for example because the file has changed."""

import logging
import os
from pathlib import Path

from rlpack.batch.errors import DataError
from rlpack.checkpoint.commit import load_state
from rlpack.config.recipes import recipe_section
from rlpack.config.schema import Config
from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.data.prompts import Prompts
from rlpack.recipes.driver.splits import load_held_out
from rlpack.recipes.evaluate.checkpoint_export import deletion_explained
from rlpack.startup.evaluated_model import held_out_source, run_config

logger = logging.getLogger(__name__)


def warn_of_other_prompts(config: Config, prompts: Prompts) -> None:
    """Log a warning if the run's source of held-out prompts has other ones than when its checkpoint was written.

    Nothing is compared for a model, nor if the command names another source or split. Overrides of other keys may
    change the prompts; the run's own are then read and encoded as the run did it.

    Args:
        config: configuration of the evaluation.
        prompts: its prompts.

    Raises:
        CheckpointError: the run has deleted the checkpoint.
    """
    checkpoint = recipe_section(config, Evaluate).checkpoint
    if checkpoint is None:
        return
    with deletion_explained(Path(checkpoint)):
        state = load_state(Path(checkpoint))
    run, source = run_config(state), held_out_source(config)
    if (*config.data.held_out, config.data.validation_split) != (*run.data.held_out, run.data.validation_split):
        return
    if prompts.has_fingerprint(state["held_out"]) or _are_unchanged(run, state["held_out"]):
        return
    place = ""
    if Path(source).exists() and not os.path.isabs(source):
        place = f" (relative paths start at {Path.cwd()}: run the command in the directory where the run was started)"
    logger.warning(
        "%s has other prompts than when the run wrote the checkpoint%s; the results can't be compared with the run's "
        "own evaluations",
        source,
        place,
    )


def _are_unchanged(run: Config, fingerprint: str) -> bool:
    """Return whether the held-out prompts, read with the run's own keys, have this fingerprint."""
    if run.model.path is None and run.model.tokenizer is None:
        return True  # the tokenizer is built from all prompts of the run, so exporting the model has compared them
    try:
        return load_held_out(run)[1].has_fingerprint(fingerprint)
    except DataError:
        return False

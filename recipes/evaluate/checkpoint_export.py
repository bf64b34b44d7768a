"""The model folder of a run's checkpoint, without a trainer.

A checkpoint holds the actor's sharded weights and its optimizer, and neither model config nor tokenizer. The model
is built as the run built it, the weights are read into it by one process, and the tokenizer is loaded, or built from
the run's prompts, again. The process holds the model once, in fp32; the export writes its weights one after another.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlpack.batch.errors import DataError
from rlpack.checkpoint.commit import load_state
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.files import discard_folder
from rlpack.checkpoint.publish import MARKER
from rlpack.checkpoint.sharded import load_weights
from rlpack.config.schema import Config
from rlpack.data.tokenization import eos_id, pad_id
from rlpack.models import own_attention
from rlpack.models.loading import build_causal_lm, load_tokenizer
from rlpack.models.model_export import export_model
from rlpack.models.policy import Policy
from rlpack.models.policy_folder import complete_policy_folder
from rlpack.models.stop_tokens import own_stop_token_ids
from rlpack.recipes.driver.resume import LoadedCheckpoint, check_same_prompts
from rlpack.recipes.driver.splits import load_splits
from rlpack.startup.evaluated_model import run_config
from rlpack.workers.build import set_trained_weights


@contextmanager
def exported_checkpoint(checkpoint: Path, folder: Path) -> Iterator[None]:
    """Write the policy of a checkpoint as a Hugging Face folder, which exists inside the block.

    Raises:
        CheckpointError: the checkpoint doesn't fit the model that its run's configuration describes, or the run has
            deleted it.
        ModelError: the run's base model or tokenizer can't be loaded.
        DataError: the tokenizer was built from prompts that have changed or are gone.
    """
    discard_folder(folder)  # left by a kill
    try:
        with deletion_explained(checkpoint):
            export_checkpoint(checkpoint, folder)
        yield
    finally:
        discard_folder(folder)


@contextmanager
def deletion_explained(checkpoint: Path) -> Iterator[None]:
    """Explain an error of reading a checkpoint that its run, which is in progress, has deleted since it was verified.

    Raises:
        CheckpointError: the checkpoint could not be read, and is no longer there.
    """
    try:
        yield
    except (CheckpointError, OSError) as error:
        if (checkpoint / MARKER).exists():  # it is deleted first
            raise
        raise CheckpointError(
            f"the run has since deleted {checkpoint}, because it keeps only its newest checkpoints; run the command "
            "again, or raise the run's checkpoint.keep"
        ) from error


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the policy of a checkpoint, with merged adapters, and its tokenizer; see `exported_checkpoint`."""
    state = load_state(checkpoint)
    config = run_config(state)
    tokenizer = _tokenizer(config, checkpoint, state)
    model = build_causal_lm(
        config.model,
        vocab_size=len(tokenizer),
        eos_token_id=eos_id(tokenizer),
        pad_token_id=pad_id(tokenizer),
        seed=config.seed,
        attention_name=own_attention.DEFAULT,  # the model is never run, and some architectures can't have ours
    )
    set_trained_weights(model, config.actor, seed=config.seed)
    policy = Policy(model)
    load_weights(policy, checkpoint / "actor")
    export_model(policy, folder)
    complete_policy_folder(folder, config.model, tokenizer, stop_token_ids=own_stop_token_ids(config, tokenizer))


def _tokenizer(config: Config, checkpoint: Path, state: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the run's tokenizer; one of characters is built from the run's prompts, which must not have changed."""
    if config.model.path is not None or config.model.tokenizer is not None:
        return load_tokenizer(config.model)
    try:
        tokenizer, prompts, held_out = load_splits(config)
        check_same_prompts(LoadedCheckpoint(checkpoint, dict(state)), config, prompts, held_out)
    except DataError as error:
        raise DataError(
            "the tokenizer is built from the run's own prompts, so run the command in the directory where the run was "
            f"started, with the same data: {error}"
        ) from error
    return tokenizer

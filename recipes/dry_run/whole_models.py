"""Find the models that every rank holds as a whole before sharding, by trying to open them in the same way as ranks."""

import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlpack.config.schema import Config
from rlpack.models.open_model import check_in_parts, open_classifier
from rlpack.models.stored_model import NotInPartsError
from rlpack.recipes.dry_run.role_memory import meta_model, model_of, transformers_model
from rlpack.workers.build import open_in_parts, whole_bytes


def bytes_at_start(config: Config, role: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the bytes of a role's model if every rank holds it as a whole before sharding, else 0.

    Of a model that isn't downloaded, only the config is read.
    """
    model, key = model_of(config, role)
    try:
        if model.path is not None and not Path(os.path.expanduser(model.path)).is_dir():
            check_in_parts(model, key=key, classifier=role == "reward_model")
            return 0
        if role == "reward_model":
            open_classifier(config.reward_model, vocab_size=len(tokenizer))
            return 0
        in_parts = open_in_parts(model, tokenizer, key=key) is not None
    except NotInPartsError:
        in_parts = False
    if in_parts:
        return 0
    if role == "reward_model":
        return whole_bytes(meta_model(config, role, tokenizer).model)
    return whole_bytes(transformers_model(config, role, tokenizer))

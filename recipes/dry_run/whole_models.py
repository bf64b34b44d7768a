"""Find the models that every rank holds as a whole before sharding, by trying to open them in the same way as ranks."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlpack.config.schema import Config, Model
from rlpack.data.tokenization import pad_id
from rlpack.models.loading import build_meta_model
from rlpack.models.open_model import check_in_parts, open_classifier
from rlpack.models.stored_model import NotInPartsError
from rlpack.recipes.dry_run.role_memory import meta_model
from rlpack.workers.build import open_in_parts, whole_bytes


def bytes_at_start(config: Config, role: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the bytes of a role's model if every rank holds it as a whole before sharding, else 0.

    Of a model that isn't downloaded, only the config is read.
    """
    model, key = model_of(config, role)
    try:
        if model.path is not None and not Path(model.path).expanduser().is_dir():
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
    # A critic is built from a language model, including its head.
    return whole_bytes(build_meta_model(model, vocab_size=len(tokenizer), pad_token_id=pad_id(tokenizer), key=key))


def model_of(config: Config, role: str) -> tuple[Model, str]:
    """Return the section that describes a role's model, and the key of its path."""
    own = {"critic": config.critic, "reward_model": config.reward_model}.get(role)
    if own is None or own.path is None:
        return config.model, "model.path"
    return Model(path=own.path, revision=own.revision), f"{role}.path"

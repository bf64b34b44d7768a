"""The vocabulary of a model."""

from torch import nn
from transformers import PreTrainedModel

from rlpack.models.errors import ModelError


def check_vocabulary(model: PreTrainedModel, vocab_size: int | None) -> None:
    """Raise unless a model's number of tokens is known and at least the tokenizer's.

    Args:
        model: with or without weights.
        vocab_size: the tokenizer's; None if not known.

    Raises:
        ModelError: the model has fewer tokens, no input embedding, or no vocab_size.
    """
    known = input_embedding(model).num_embeddings
    try:
        _ = model.config.get_text_config().vocab_size
    except AttributeError as error:
        raise ModelError(
            f"{type(model).__name__} has no vocab_size in its config, but generation needs it; set it there (the model "
            f"has {known} embeddings)"
        ) from error
    if vocab_size is not None and vocab_size > known:
        raise ModelError(
            f"the tokenizer has {vocab_size} tokens and the model {known}; set model.tokenizer to the model's own, or, "
            f"if tokens were added to it, save the model with {vocab_size} embeddings (model.resize_token_embeddings)"
        )


def input_embedding(model: PreTrainedModel) -> nn.Embedding:
    """Return the embedding of a model's tokens.

    Raises:
        ModelError: the model has none that transformers can find.
    """
    embedding = find_embedding(model)
    if not isinstance(embedding, nn.Embedding):
        given = "none" if embedding is None else f"a {type(embedding).__name__}"
        raise ModelError(
            f"{type(model).__name__} has no input embedding (get_input_embeddings() gives {given}), so its tokens "
            "can't be counted; have its class return an nn.Embedding there, or use another model"
        )
    return embedding


def find_embedding(model: PreTrainedModel) -> nn.Module | None:
    """Return what transformers takes for a model's input embedding; None if it finds none, as in BART's decoder."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # transformers' default finds none
        return None

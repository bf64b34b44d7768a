"""Check whether the Hub has a model, without importing PyTorch."""

from rlpack.config.schema import Model
from rlpack.data.hub import NotOnHubError, Repository, hub_problem
from rlpack.models.errors import ModelError


def revision_of(model: Model, key: str) -> str | None:
    """Return the revision of `model.path` or, for the key `model.tokenizer`, of a tokenizer from another repository."""
    is_another = key == "model.tokenizer" and model.tokenizer != model.path
    return model.tokenizer_revision if is_another else model.revision


def revision_key(key: str) -> str:
    """Return the key of a source's revision.

    >>> revision_key("critic.path"), revision_key("model.tokenizer")
    ('critic.revision', 'model.tokenizer_revision')
    """
    return "model.tokenizer_revision" if key == "model.tokenizer" else f"{key.partition('.')[0]}.revision"


def hub_model_problem(key: str, name: str, revision: str | None) -> str:
    """Return why the Hub doesn't confirm that it has a model; "" if it does.

    Args:
        key: configuration key of the name, for the error.
        name: name of the model.
        revision: a branch, tag or commit; None for the newest.

    Raises:
        ModelError: the Hub has no such model, or the user has no access.
    """
    try:
        return hub_problem(Repository("model", name, revision))
    except NotOnHubError as error:
        raise ModelError(
            f"{key} is {name!r}: the hub has no such model, or you have no access (revision {revision or 'main'}); "
            f"check the name and {revision_key(key)}, or log in"
        ) from error

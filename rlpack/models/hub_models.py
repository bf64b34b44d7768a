"""Check whether the Hub has a model, without importing PyTorch."""

from rlpack.data.hub import NotOnHubError, Repository, hub_problem
from rlpack.models.errors import ModelError


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
            f"check the name and {key.partition('.')[0]}.revision, or log in"
        ) from error

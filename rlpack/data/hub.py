"""Ask the Hugging Face Hub, within seconds, whether it has datasets and models; its clients would retry for minutes.

A run asks for all of its repositories at once (`ask_hub`), so a Hub that does not answer costs one deadline, not one
per repository. Answers are kept for a minute, because loaders need them again.
"""

import threading
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

# Including the time that the command takes to start, an error is reported within ten seconds.
DEADLINE_S = 6.0
_KEEP_S = 60.0


class NotOnHubError(Exception):
    """The Hub answered that it has no such repository, or that the user has no access."""


class Repository(NamedTuple):
    """A dataset or a model on the Hub; revision None is the newest."""

    kind: Literal["dataset", "model"]
    name: str
    revision: str | None = None


class _Question:
    """A request to the Hub, made in a thread, because a DNS lookup may outlast all of the client's timeouts."""

    def __init__(self, repository: Repository) -> None:
        self.asked = time.monotonic()
        self._repository = repository
        self._problem: str | NotOnHubError = ""
        self._thread = threading.Thread(target=self._ask, name="hub", daemon=True)
        self._thread.start()

    def problem(self) -> str:
        """Return why the Hub doesn't confirm the repository, at the latest `DEADLINE_S` after asking."""
        self._thread.join(timeout=max(0.0, self.asked + DEADLINE_S - time.monotonic()))
        if self._thread.is_alive():
            return f"no answer in {DEADLINE_S:g} s"
        if isinstance(self._problem, NotOnHubError):
            raise self._problem
        return self._problem

    def _ask(self) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        kind, name, revision = self._repository
        ask = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
        try:
            ask(name, revision=revision, timeout=DEADLINE_S)
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
            self._problem = NotOnHubError(str(error))
        except HfHubHTTPError as error:
            self._problem = f"it answered {error.response.status_code}"
        except Exception as error:  # noqa: BLE001 - the kinds of errors depend on the client's HTTP library
            self._problem = f"it can't be reached: {error or type(error).__name__}"


_QUESTIONS: dict[tuple[str, Repository], _Question] = {}


def ask_hub(repositories: Iterable[Repository]) -> None:
    """Start to ask for all repositories; `hub_problem` waits for the answers."""
    for repository in repositories:
        _question(repository)


def hub_problem(repository: Repository) -> str:
    """Return why the Hub doesn't confirm that it has a repository; "" if it does.

    Raises:
        NotOnHubError: the Hub has no such repository, or the user has no access.
    """
    question = _question(repository)
    return "HF_HUB_OFFLINE is set" if question is None else question.problem()


def _question(repository: Repository) -> _Question | None:
    """Return the question for a repository, asked now or less than a minute ago; None if the user works offline."""
    from huggingface_hub import HfApi, constants  # HfApi: threads that import it at the same time may deadlock

    if constants.HF_HUB_OFFLINE:
        return None
    key = (HfApi().endpoint, repository)
    question = _QUESTIONS.get(key)
    if question is None or question.asked + _KEEP_S < time.monotonic():
        question = _QUESTIONS[key] = _Question(repository)
    return question

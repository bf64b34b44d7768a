"""Score rows of tokens with a reward model behind vLLM's `/classify`, such as that of `rlpack serve`.

The score is the classifier's output at a row's last token, without activation. Rows travel as token ids, so nothing is
tokenized again.
"""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from rlpack.rewards.errors import RewardError
from rlpack.rewards.reward_result import MAX_REWARD, RewardResult
from rlpack.rewards.score_requests import AttemptFailedError, RequestSettings, ScoreRequests, excerpt


class RewardModelClient:
    """Client that scores one batch."""

    def __init__(
        self,
        settings: RequestSettings,
        max_failed_rows: float = float("inf"),
        *,
        pad_token_id: int | None = None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """Allow `max_failed_rows` failed rows and use shared `slots`, as `ScoreRequests` does.

        Args:
            settings: how the server is called.
            max_failed_rows: number of failed rows that are allowed.
            pad_token_id: the classifier's padding token; a row is scored at its last other token, as in transformers.
            slots: held by each row in progress.
        """
        self._model, self._pad_token_id = settings.model, pad_token_id
        url = classify_url(settings.url)
        self._requests = ScoreRequests(settings, url, partial(read_score, url=url), max_failed_rows, slots=slots)

    @property
    def num_retries(self) -> int:
        """Number of requests so far, not counting the first of each row."""
        return self._requests.num_retries

    async def score(self, rows: Sequence[Sequence[int]]) -> list[RewardResult]:
        """Return the result of every row of token ids; a row without tokens has no score.

        Raises:
            RewardError: the server rejects a request permanently, or its model has more than one label.
        """
        counted = [row for row in rows if row]
        scored = iter(await self._requests.score([self._body(row) for row in counted]))
        empty = RewardResult(problem="none", detail="no tokens")
        return [next(scored) if row else empty for row in rows]

    def _body(self, row: Sequence[int]) -> dict[str, Any]:
        tokens = list(row)[: scored_length(row, self._pad_token_id)]
        return {"model": self._model, "input": [tokens], "use_activation": False}


def read_score(body: str, url: str) -> RewardResult:
    """Return the score in vLLM's answer to a request with one row; a score that is not finite is not retried.

    Args:
        body: body of the answer.
        url: URL of the server, for errors.

    Raises:
        AttemptFailedError: there is no such score; another request may get one.
        RewardError: the model has more than one label.
    """
    match _parsed(body):
        case {"data": [{"probs": [int() | float() as score]}]} if not isinstance(score, bool):
            if not abs(score) <= MAX_REWARD:  # nor NaN
                return RewardResult(problem="invalid", detail=f"{url} gave the score {excerpt(str(score))}")
            return RewardResult(float(score))
        case {"data": [{"probs": [_, _, *_] as labels}]}:
            raise RewardError(
                f"{url} gave {len(labels)} scores for a row, so its model has more than one label; serve a reward "
                "model with one label, or check judge.url"
            )
    raise AttemptFailedError("error", f"{url} answered without one score for one row: {excerpt(body)!r}")


def _parsed(body: str) -> Any:
    """Return a JSON value; None if there is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def classify_url(base_url: str) -> str:
    """Return the address of vLLM's classification, which is next to `/v1`.

    >>> classify_url("http://a:80/v1/"), classify_url("http://a:80")
    ('http://a:80/classify', 'http://a:80/classify')
    """
    return f"{base_url.rstrip('/').removesuffix('/v1')}/classify"


def scored_length(row: Sequence[int], pad_token_id: int | None) -> int:
    """Return the length of a row up to its last token that isn't padding; 1 if all are.

    >>> scored_length([5, 0, 6, 0, 0], 0), scored_length([5, 0], None), scored_length([0, 0], 0)
    (3, 2, 1)
    """
    return max([index for index, token in enumerate(row, start=1) if token != pad_token_id], default=1)

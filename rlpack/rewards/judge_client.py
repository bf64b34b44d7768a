"""Score responses with a language model behind an OpenAI-compatible URL.

The judge's answers are untrusted, like a policy's: an answer without a score in range is a counted failure. Each
request has one deadline for the whole exchange. Failed requests are retried a bounded number of times, and retries are
counted.
"""

import asyncio
import json
import os
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from rlpack.data.examples import conversation
from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool.processes import printable
from rlpack.rewards.reward_result import SKIPPED, Problem, RewardResult

_SCORE = re.compile(r"score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)(?![eE\d])", re.IGNORECASE)
_MAX_ANSWER_BYTES = 4 << 20
# Status codes that no retry can change.
_PERMANENT_ERRORS = {400, 401, 403, 404, 405, 422}
_EXCERPT_CHARACTERS = 200


@dataclass(frozen=True)
class JudgeSettings:
    """How the judge is called.

    Attributes:
        url: base URL, without `/chat/completions`.
        model: name of the model on that server.
        api_key: sent as a bearer token; None sends none.
        prompt_template: the user message, with `{prompt}`, `{completion}` and `{column}` placeholders.
        max_score: scores range from 0 to this.
        max_tokens: length limit of an answer.
        concurrency: number of simultaneous requests.
        timeout_s: deadline of a request.
        retries: attempts after the first failed one.
        backoff_s: pause before the first retry; it doubles with each retry.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    prompt_template: str = "{prompt}{completion}"
    max_score: float = 10.0
    max_tokens: int = 512
    concurrency: int = 16
    timeout_s: float = 60.0
    retries: int = 2
    backoff_s: float = 1.0


def api_key(variable: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the judge's API key from its environment variable, None if it needs none.

    Args:
        variable: `judge.api_key_env`.
        environment: the variables and their values.

    Raises:
        RewardError: the variable isn't set.
    """
    if variable is None:
        return None
    key = environment.get(variable)
    if not key:
        raise RewardError(
            f"judge.api_key_env is {variable!r}, and that environment variable isn't set; set it where the ranks run, "
            "or set judge.api_key_env=null"
        )
    return key


class _AttemptFailed(Exception):  # noqa: N818 - never leaves this file
    """A request that gave no answer."""

    def __init__(self, problem: Problem, detail: str) -> None:
        super().__init__(detail)
        self.problem: Problem = problem


class JudgeClient:
    """Client that scores one batch.

    Attributes:
        num_retries: number of requests so far, not counting the first of each row.
    """

    def __init__(self, settings: JudgeSettings, max_failed_rows: float = float("inf")) -> None:
        """Allow `max_failed_rows` failed rows.

        After one more, the remaining rows are skipped and count as failed.
        """
        self.num_retries = 0
        self._settings = settings
        self._failures_left = max_failed_rows
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def score(self, columns: Mapping[str, Sequence[Any]], num_rows: int) -> list[RewardResult]:
        """Return the result of every row, rewards from 0 to 1.

        Raises:
            RewardError: the server rejects the request permanently, for a wrong key, model or address.
        """
        names = placeholders(self._settings.prompt_template)
        headers = {} if self._settings.api_key is None else {"Authorization": f"Bearer {self._settings.api_key}"}
        limits = httpx.Limits(max_connections=self._settings.concurrency)
        async with httpx.AsyncClient(headers=headers, limits=limits, timeout=self._settings.timeout_s) as client:
            rows = [{name: _as_text(name, columns[name][row]) for name in names} for row in range(num_rows)]
            tasks = [asyncio.create_task(self._score_row(client, row)) for row in rows]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _score_row(self, client: httpx.AsyncClient, texts: Mapping[str, str]) -> RewardResult:
        async with self._slots:
            if self._failures_left < 0:
                return RewardResult(problem="error", detail=f"skipped {SKIPPED}")
            result = await self._score_with_retries(client, texts)
            self._failures_left -= result.failed
            return result

    async def _score_with_retries(self, client: httpx.AsyncClient, texts: Mapping[str, str]) -> RewardResult:
        """Send up to 1 + `retries` requests; an answer without a score is final."""
        failure = _AttemptFailed("error", "")
        for attempt in range(1 + self._settings.retries):
            if attempt:
                self.num_retries += 1
                await asyncio.sleep(self._settings.backoff_s * 2 ** (attempt - 1))
            try:
                return self._result_of(await self._request_answer(client, texts))
            except _AttemptFailed as error:
                failure = error
        return RewardResult(problem=failure.problem, detail=str(failure))

    def _result_of(self, answer: str) -> RewardResult:
        max_score = self._settings.max_score
        score = parse_score(answer, max_score)
        if score is None:
            return RewardResult(problem="invalid", detail=f"no score from 0 to {max_score:g} in {_excerpt(answer)!r}")
        return RewardResult(score / max_score)

    async def _request_answer(self, client: httpx.AsyncClient, texts: Mapping[str, str]) -> str:
        """Return the text of the judge's answer.

        Raises:
            _AttemptFailed: there is none; a retry may succeed.
            RewardError: the server rejects the request permanently.
        """
        settings = self._settings
        request = {
            "model": settings.model,
            "messages": [{"role": "user", "content": settings.prompt_template.format_map(texts)}],
            "max_tokens": settings.max_tokens,
            "temperature": 0.0,
        }
        url = f"{settings.url.rstrip('/')}/chat/completions"
        try:
            async with (
                asyncio.timeout(settings.timeout_s),  # httpx restarts its own timeout with every byte
                client.stream("POST", url, json=request) as response,
            ):
                body = await _read_body(response)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _AttemptFailed("timeout", f"{url} did not answer within {settings.timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _AttemptFailed("error", f"{url}: {type(error).__name__}: {error}") from error
        _check_status(response, body, url)
        return _message_content(body, url)


def _as_text(name: str, value: Any) -> str:
    """Return a column's value as the judge reads it: the messages of a chat prompt, a line each."""
    return conversation(value) if name == "prompt" and isinstance(value, list) else str(value)


def placeholders(prompt_template: str) -> list[str]:
    """Return the column names in a prompt template.

    >>> placeholders("Rate {completion} against {answer}.")
    ['completion', 'answer']

    Raises:
        RewardError: a brace is not closed, or encloses something other than a name.
    """
    hint = "write {completion}, {prompt} or {column}, and {{ for a literal brace"
    try:
        fields = [entry for entry in string.Formatter().parse(prompt_template) if entry[1] is not None]
    except ValueError as error:
        raise RewardError(f"judge.prompt_template can't be parsed: {error}; {hint}") from error
    names = [str(name) for _, name, _, _ in fields]
    invalid = [name for name in names if not name.isidentifier()]
    invalid += [str(name) for _, name, spec, conversion in fields if spec or conversion]
    if invalid:
        raise RewardError(f"judge.prompt_template contains {{{invalid[0]}}}, which is not a column name; {hint}")
    return list(dict.fromkeys(names))


def check_prompt_template(prompt_template: str, columns: Iterable[str]) -> None:
    """Check that a prompt template names existing columns, and the response.

    Raises:
        RewardError: a named column doesn't exist, or `{completion}` isn't named.
    """
    names, known = placeholders(prompt_template), {"prompt", "completion", *columns}
    missing = [name for name in names if name not in known]
    if missing:
        raise RewardError(f"judge.prompt_template names {{{missing[0]}}}; the dataset has the columns {sorted(known)}")
    if "completion" not in names:
        raise RewardError("judge.prompt_template doesn't name {completion}, so the judge would not see the response")


def parse_score(answer: str, max_score: float) -> float | None:
    """Return the last score in an answer, None if out of range.

    >>> parse_score("It could be a Score: 3. No: **Score: 7.5**", 10.0), parse_score("Score: 11", 10.0)
    (7.5, None)
    """
    scores = _SCORE.findall(answer)
    score = float(scores[-1]) if scores else -1.0
    return score if 0.0 <= score <= max_score else None


async def _read_body(response: httpx.Response) -> str:
    """Return the body of a response, up to a size limit."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MAX_ANSWER_BYTES:
            raise _AttemptFailed("error", f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    return body.decode(errors="replace")


def _check_status(response: httpx.Response, body: str, url: str) -> None:
    text = f"{url} answered {response.status_code} {response.reason_phrase}: {_excerpt(body)}"
    if response.status_code in _PERMANENT_ERRORS:
        raise RewardError(f"{text}; check judge.url, judge.model and judge.api_key_env")
    if response.status_code != httpx.codes.OK:
        raise _AttemptFailed("error", text)


def _message_content(body: str, url: str) -> str:
    try:
        match json.loads(body):
            case {"choices": [{"message": {"content": str(content)}}, *_]}:
                return content
    except (ValueError, RecursionError):
        pass
    raise _AttemptFailed("error", f"{url} answered with no chat completion: {_excerpt(body)!r}")


def _excerpt(text: str) -> str:
    return printable(text[:_EXCERPT_CHARACTERS])

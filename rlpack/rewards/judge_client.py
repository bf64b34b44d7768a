"""Ask a language model behind an OpenAI-compatible URL for a score of each response.

The judge's answers are believed no more than a policy's: what has no score in its bounds is a counted failure, however
it came about. Every request has a deadline as a whole, failed ones are repeated a bounded number of times, and both are
counted.
"""

import asyncio
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool.processes import printable
from rlpack.rewards.reward_result import GIVEN_UP, Problem, Verdict

_SCORE = re.compile(r"score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)(?![eE\d])", re.IGNORECASE)
_LARGEST_ANSWER = 4 << 20
_REFUSED = {400, 401, 403, 404, 405, 422}
_EXCERPT = 200


@dataclass(frozen=True)
class JudgeSettings:
    """How a judge is asked.

    Attributes:
        url: base URL; `/chat/completions` follows.
        model: its name there.
        api_key: sent as a bearer token; None sends none.
        prompt_template: the one message, with `{prompt}`, `{completion}` and `{column}` for a row's texts.
        max_score: scores run from 0 to this.
        max_tokens: longest answer.
        concurrency: requests at one time.
        timeout_s: deadline of a request.
        retries: further attempts after a failed one.
        backoff_s: pause before the first retry; it doubles with each.
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


class _Failure(Exception):  # noqa: N818 - never leaves this file
    """An attempt that gave no score."""

    def __init__(self, problem: Problem, text: str) -> None:
        super().__init__(text)
        self.problem: Problem = problem


class JudgeClient:
    """Asks for the scores of one batch.

    Attributes:
        retries: attempts beyond the first of each row.
    """

    def __init__(self, settings: JudgeSettings, allowed: float = float("inf")) -> None:
        """Take at most `allowed` failed rows; what is left then is not asked for and counts as failed, too."""
        self.retries = 0
        self._settings = settings
        self._left = allowed
        self._places = asyncio.Semaphore(settings.concurrency)

    async def scores(self, columns: Mapping[str, Sequence[Any]], num_rows: int) -> list[Verdict]:
        """Return the verdict on every row, rewards from 0 to 1.

        Raises:
            RewardError: the server refuses such requests: a wrong key, model or address.
        """
        names = placeholders(self._settings.prompt_template)
        headers = {} if self._settings.api_key is None else {"Authorization": f"Bearer {self._settings.api_key}"}
        limits = httpx.Limits(max_connections=self._settings.concurrency)
        async with httpx.AsyncClient(headers=headers, limits=limits, timeout=self._settings.timeout_s) as client:
            rows = [{name: str(columns[name][row]) for name in names} for row in range(num_rows)]
            asked = [asyncio.create_task(self._row(client, row)) for row in rows]
            try:
                return await asyncio.gather(*asked)
            finally:
                for task in asked:
                    task.cancel()

    async def _row(self, client: httpx.AsyncClient, texts: Mapping[str, str]) -> Verdict:
        async with self._places:
            if self._left < 0:
                return Verdict(problem="error", text=f"not asked for, {GIVEN_UP}")
            verdict = await self._attempts(client, texts)
            self._left -= verdict.failed
            return verdict

    async def _attempts(self, client: httpx.AsyncClient, texts: Mapping[str, str]) -> Verdict:
        """Ask until there is a score, at most 1 + `retries` times; an answer without one is not asked for again."""
        failure = _Failure("error", "")
        for attempt in range(1 + self._settings.retries):
            if attempt:
                self.retries += 1
                await asyncio.sleep(self._settings.backoff_s * 2 ** (attempt - 1))
            try:
                answer = await self._ask(client, texts)
            except _Failure as error:
                failure = error
                continue
            score = score_in(answer, self._settings.max_score)
            if score is None:
                text = f"no score from 0 to {self._settings.max_score:g} in {_excerpt(answer)!r}"
                return Verdict(problem="invalid", text=text)
            return Verdict(score / self._settings.max_score)
        return Verdict(problem=failure.problem, text=str(failure))

    async def _ask(self, client: httpx.AsyncClient, texts: Mapping[str, str]) -> str:
        """Return the judge's words.

        Raises:
            _Failure: there are none; another attempt may bring some.
            RewardError: the server refuses such requests.
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
                asyncio.timeout(settings.timeout_s),  # the client's own starts again with every byte
                client.stream("POST", url, json=request) as response,
            ):
                body = await _body(response)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _Failure("timeout", f"{url} did not answer within {settings.timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _Failure("error", f"{url}: {type(error).__name__}: {error}") from error
        if response.status_code in _REFUSED:
            raise RewardError(
                f"{url} answered {response.status_code} {response.reason_phrase}: {_excerpt(body)}; look at judge.url, "
                "judge.model and judge.api_key_env"
            )
        if response.status_code != httpx.codes.OK:
            raise _Failure("error", f"{url} answered {response.status_code} {response.reason_phrase}: {_excerpt(body)}")
        return _content(body, url)


def placeholders(prompt_template: str) -> list[str]:
    """Return the columns that prompt_template name.

    >>> placeholders("Rate {completion} against {answer}.")
    ['completion', 'answer']

    Raises:
        RewardError: a brace is not closed, or holds something else than a name.
    """
    way_out = "write {completion}, {prompt} or {column}, and {{ for a brace"
    try:
        names = [name for _, name, form, conversion in string.Formatter().parse(prompt_template) if name is not None]
        odd = [name for name in names if not name.isidentifier()]
        odd += [name for _, name, form, conversion in string.Formatter().parse(prompt_template) if form or conversion]
    except ValueError as error:
        raise RewardError(f"judge.prompt_template can't be read: {error}; {way_out}") from error
    if odd:
        raise RewardError(f"judge.prompt_template holds {{{odd[0]}}}, which is no column's name; {way_out}")
    return list(dict.fromkeys(names))


def check_prompt_template(prompt_template: str, columns: Iterable[str]) -> None:
    """Check that prompt_template name columns that are there, and the response.

    Raises:
        RewardError: they don't.
    """
    names, known = placeholders(prompt_template), {"prompt", "completion", *columns}
    missing = [name for name in names if name not in known]
    if missing:
        raise RewardError(f"judge.prompt_template names {{{missing[0]}}}; the dataset has the columns {sorted(known)}")
    if "completion" not in names:
        raise RewardError("judge.prompt_template doesn't name {completion}, so the judge would not see the response")


def score_in(answer: str, largest: float) -> float | None:
    """Return the last score that an answer states, None where there is none from 0 to `largest`.

    >>> score_in("It could be a Score: 3. No: **Score: 7.5**", 10.0), score_in("Score: 11", 10.0)
    (7.5, None)
    """
    found = _SCORE.findall(answer)
    score = float(found[-1]) if found else -1.0
    return score if 0.0 <= score <= largest else None


async def _body(response: httpx.Response) -> str:
    """Return what a server says, as long as that is bounded."""
    parts = bytearray()
    async for part in response.aiter_bytes():
        parts += part
        if len(parts) > _LARGEST_ANSWER:
            raise _Failure("error", f"an answer of more than {_LARGEST_ANSWER} bytes")
    return parts.decode(errors="replace")


def _content(body: str, url: str) -> str:
    try:
        match json.loads(body):
            case {"choices": [{"message": {"content": str(content)}}, *_]}:
                return content
    except (ValueError, RecursionError):
        pass
    raise _Failure("error", f"{url} answered what is no chat completion: {_excerpt(body)!r}")


def _excerpt(text: str) -> str:
    return printable(text[:_EXCERPT])

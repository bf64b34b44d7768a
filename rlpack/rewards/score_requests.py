"""Requests to a server that scores responses: one for each row, with a deadline, bounded retries and a size limit.

The server's answers are untrusted: one without a score is a counted failure of its row. Each request has one deadline
for the whole exchange.
"""

import asyncio
import ipaddress
import json
import os
import re
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx

from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool.processes import printable
from rlpack.rewards.reward_result import SKIPPED, Problem, RewardResult

_MAX_ANSWER_BYTES = 4 << 20
# Status codes that no retry can change.
_PERMANENT_ERRORS = {400, 401, 403, 404, 405, 422}
# Those that servers return for too many tokens, among others.
_MAYBE_TOO_LONG = {400, 422}
_EXCERPT_CHARACTERS = 200
_KEY = re.compile(r"[!-~]+")
# Bodies are escaped to ASCII: texts may hold unpaired surrogates, which have no bytes in UTF-8.
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class RequestSettings:
    """How the server is called.

    Attributes:
        url: base URL.
        model: name of the model on that server.
        api_key: sent as a bearer token; None sends none.
        concurrency: number of simultaneous requests; with `rlpack.rewards.request_loop.RequestLoop`, of all batches.
        timeout_s: deadline of a request.
        retries: attempts after the first failed one.
        backoff_s: pause before the first retry; it doubles with each retry.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 16
    timeout_s: float = 60.0
    retries: int = 2
    backoff_s: float = 1.0


class AttemptFailedError(Exception):
    """A request without a usable answer.

    Attributes:
        problem: kind of the failure.
        may_succeed: whether a retry may succeed.
    """

    def __init__(self, problem: Problem, detail: str, *, may_succeed: bool = True) -> None:
        super().__init__(detail)
        self.problem: Problem = problem
        self.may_succeed = may_succeed


def api_key(variable: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the server's API key from its environment variable, None if it needs none.

    Spaces and line breaks around it are removed, since files of secrets often end in a line break.

    Args:
        variable: `judge.api_key_env`.
        environment: the variables and their values.

    Raises:
        RewardError: the variable isn't set, or its value can't be sent in a header.
    """
    if variable is None:
        return None
    key = environment.get(variable, "").strip()
    if key and not _KEY.fullmatch(key):  # not shown: it is a secret
        raise RewardError(
            f"judge.api_key_env is {variable!r}, but that environment variable holds spaces or characters that are not "
            "printable ASCII, which no API key has; set it to the key alone"
        )
    if not key:
        raise RewardError(
            f"judge.api_key_env is {variable!r}, but that environment variable isn't set; set it where the ranks run, "
            "or set judge.api_key_env=null"
        )
    return key


class ScoreRequests:
    """Sends the requests of one batch.

    Attributes:
        num_retries: number of requests so far, not counting the first of each row.
    """

    def __init__(
        self,
        settings: RequestSettings,
        url: str,
        read_score: Callable[[str], RewardResult],
        max_failed_rows: float = float("inf"),
        refusals: Collection[int] = (),
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """Allow `max_failed_rows` failed rows.

        After one more, the remaining rows are skipped and count as failed.

        Args:
            settings: how the server is called.
            url: address of the requests.
            read_score: returns the result in the body of an answer, which is final; raises AttemptFailedError if
                another request may get a better answer.
            max_failed_rows: number of failed rows that are allowed.
            refusals: status codes by which the server refuses single rows, which fail without a retry, rather than all.
            slots: held by each row in progress; by default the batch has `concurrency` separate slots.
        """
        self.num_retries = 0
        self._refusals = refusals
        self._settings, self._url, self._read_score = settings, url, read_score
        self._failures_left = max_failed_rows
        self._slots = asyncio.Semaphore(settings.concurrency) if slots is None else slots

    async def score(self, bodies: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        """Return the result of each request.

        Raises:
            RewardError: the server rejects a request permanently, for a wrong key, model or address.
        """
        settings = self._settings
        headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
        limits = httpx.Limits(max_connections=settings.concurrency)
        # If httpx is given a transport, it ignores the variables of proxies, but not those of certificates.
        certificates = _certificates()
        direct = httpx.AsyncHTTPTransport(certificates, limits=limits) if is_loopback(self._url) else None
        async with httpx.AsyncClient(
            headers=headers, verify=certificates, limits=limits, timeout=settings.timeout_s, transport=direct
        ) as client:
            tasks = [asyncio.create_task(self._score_row(client, body)) for body in bodies]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # they use the client, and maybe shared slots

    async def _score_row(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> RewardResult:
        async with self._slots:
            if self._failures_left < 0:
                return RewardResult(problem="error", detail=f"skipped {SKIPPED}")
            result = await self._score_with_retries(client, body)
            self._failures_left -= result.failed
            return result

    async def _score_with_retries(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> RewardResult:
        """Send up to 1 + `retries` requests."""
        failure = AttemptFailedError("error", "")
        for attempt in range(1 + self._settings.retries):
            if attempt:
                self.num_retries += 1
                await asyncio.sleep(self._settings.backoff_s * 2 ** (attempt - 1))
            try:
                return self._read_score(await self._request_answer(client, body))
            except AttemptFailedError as error:
                failure = error
                if not error.may_succeed:
                    break
        return RewardResult(problem=failure.problem, detail=str(failure))

    async def _request_answer(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> str:
        """Return the body of the server's answer.

        Raises:
            AttemptFailedError: there is none.
            RewardError: the server rejects the request permanently.
        """
        url, timeout_s = self._url, self._settings.timeout_s
        try:
            async with (
                asyncio.timeout(timeout_s),  # httpx restarts its own timeout with every byte
                client.stream("POST", url, content=json.dumps(body), headers=_JSON) as response,
            ):
                answer = await _read_body(response)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise AttemptFailedError("timeout", f"{url} did not answer within {timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AttemptFailedError("error", f"{url}: {type(error).__name__}: {error}") from error
        self._check_status(response, answer)
        return answer

    def _check_status(self, response: httpx.Response, body: str) -> None:
        status = response.status_code
        text = f"{self._url} answered {status} {response.reason_phrase}: {excerpt(body)}"
        if status in self._refusals:
            raise AttemptFailedError("error", text, may_succeed=False)
        if status in _PERMANENT_ERRORS:
            raise RewardError(f"{text}; check judge.url, judge.model and judge.api_key_env{self._of_length(status)}")
        if status != httpx.codes.OK:
            raise AttemptFailedError("error", text)

    def _of_length(self, status: int) -> str:
        """Return a note on rows that may be too long for the server, if it can't refuse them alone."""
        if status not in _MAYBE_TOO_LONG:
            return ""
        return (
            "; if the row is too long, start the server with a longer limit (rlpack serve --max-length), or lower "
            "data.max_prompt_tokens or rollout.max_new_tokens"
        )


def is_loopback(url: str) -> bool:
    """Return whether a URL is of this machine, which a proxy from the environment can't reach.

    >>> is_loopback("http://127.0.0.1:8000/v1"), is_loopback("http://[::1]/"), is_loopback("https://judge.example/v1")
    (True, True, False)
    """
    try:
        host = httpx.URL(url).host
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (ValueError, httpx.InvalidURL):  # another host's name, or none; a request says what is wrong with a URL
        return False


@cache
def _certificates() -> ssl.SSLContext:
    """Return the trusted certificates: to read them for every batch would take longer than a short request."""
    return httpx.create_ssl_context()


async def _read_body(response: httpx.Response) -> str:
    """Return the body of a response, up to a size limit."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MAX_ANSWER_BYTES:
            raise AttemptFailedError("error", f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    return body.decode(errors="replace")


def excerpt(text: str) -> str:
    """Return the beginning of an untrusted text, without control characters."""
    return printable(text[:_EXCERPT_CHARACTERS])

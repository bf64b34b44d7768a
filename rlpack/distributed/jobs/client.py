"""Jobs of a Ray cluster over its job server: submit, list, read, follow, stop. Every request has a deadline."""

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import ray
from aiohttp import ClientError
from pydantic import ValidationError
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient, JobType

from rlpack.config.schema import Pool
from rlpack.config.sections.submission import JOB_FILES, JOB_FILES_VARIABLE, STOP_WAIT, Submission
from rlpack.distributed.capacity import check_capacity
from rlpack.distributed.errors import JobRequestError, JobServerError
from rlpack.distributed.jobs.upload import Upload

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_CONNECT_S, _ANSWER_S = 5.0, 20.0
# The longest upload, of 512 MiB, over 2.5 Mbit/s.
_UPLOAD_S = 1800.0
# A log silent for this long may belong to a server that is gone.
_SILENCE_S = 20.0
_POLL_S = 0.2
# Ray records the end of a job a moment after its processes have exited.
_NOTED_S = 20.0
_ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
_LONGEST = 160
_JOB_ID = re.compile(r"[\w.-]+")
# Loggers that report every package, ignore file and connection.
_VERBOSE_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
)
_SECURE_HOSTS = ("localhost", "127.0.0.1", "::1")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobRecord:
    """A job, as the server reports it.

    Attributes:
        id: its submission id.
        status: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        entrypoint: its command.
        message: Ray's description of its state.
        metadata: given at submission.
        started_s: when it was submitted, in seconds since the epoch.
        ended_s: when it ended, or None.
        exit_code: exit code of its command, if it exited by itself.
    """

    id: str
    status: str
    entrypoint: str
    message: str
    metadata: Mapping[str, str]
    started_s: float
    ended_s: float | None
    exit_code: int | None

    @property
    def has_ended(self) -> bool:
        """Return whether all of its processes have ended."""
        return JobStatus(self.status).is_terminal()


class _Client(JobSubmissionClient):
    """Ray's client, with the deadlines that its requests lack."""

    def _do_request(
        self, method: str, endpoint: str, *, data: bytes | None = None, json_data: dict | None = None, **kwargs: Any
    ) -> Any:
        # The upload itself falls under the connect timeout.
        wait = (_UPLOAD_S, _UPLOAD_S) if data is not None else (_CONNECT_S, _ANSWER_S)
        return super()._do_request(method, endpoint, data=data, json_data=json_data, timeout=wait, **kwargs)


class JobServer:
    """The job server of a cluster."""

    def __init__(self, address: str) -> None:
        """Connect to the job server (Ray's dashboard) at `http://host:port`; the token is looked up the way Ray does.

        Raises:
            JobRequestError: the address is malformed, no server answers there, or the token is rejected.
        """
        self.address = _http_address(address)
        for name in _VERBOSE_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        before = os.environ.get(_ADDRESS_VARIABLE)
        os.environ[_ADDRESS_VARIABLE] = self.address  # Ray's variable overrides a given address
        try:
            with _refusals(self.address):
                self._client = _Client(self.address)
        except JobServerError as error:
            raise JobRequestError(
                f"no Ray job server answers at {self.address} ({_first_line(error.__cause__ or error)}); give the "
                "address of the cluster's dashboard (http://head-node:8265), and check that its head node was started "
                "with --include-dashboard=true"
            ) from error
        finally:
            os.environ.pop(_ADDRESS_VARIABLE)
            if before is not None:
                os.environ[_ADDRESS_VARIABLE] = before
        if urlsplit(self.address).hostname not in _SECURE_HOSTS and _answers_anyone(self.address):
            logger.warning(
                "%s takes jobs without a token: anyone who reaches it can run code there; see docs/guide.md",
                self.address,
            )

    def check_devices(self, pools: Mapping[str, Pool], driver_cpus: float) -> None:
        """Reject pools that the cluster's nodes can't hold even when idle.

        Raises:
            PlacementError: there are too few devices; the message says what is free.
            JobServerError: the server doesn't report its nodes.
        """
        with _refusals(self.address):
            nodes = self._data("/api/v0/nodes?limit=10000")["result"]["result"]
            alive = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
            status = self._data("/api/cluster_status").get("clusterStatus") or {}
            usage = (status.get("loadMetricsReport") or {}).get("usage")
            free = None if usage is None else {kind: total - used for kind, (used, total) in usage.items()}
        check_capacity(pools, alive, free, extra=driver_cpus)

    def submit(self, entrypoint: str, job: Submission, upload: Upload | None, metadata: Mapping[str, str]) -> str:
        """Upload the working directory if the cluster lacks it, start the job in it, and return its id.

        Raises:
            JobRequestError: Ray rejects the job.
            JobServerError: the server fails.
        """
        environment: dict[str, Any] = {"env_vars": {**job.env_vars, STOP_WAIT: str(job.stop_timeout_s)}}
        if job.pip:
            environment["pip"] = list(job.pip)
        try:
            with ExitStack() as stack:
                if upload is not None:
                    environment["working_dir"] = str(stack.enter_context(upload.staged()))
                    environment["env_vars"][JOB_FILES_VARIABLE] = JOB_FILES
                    entrypoint = f"cd {JOB_FILES} && {entrypoint}"
                stack.enter_context(_refusals(self.address))
                return self._client.submit_job(
                    entrypoint=entrypoint,
                    runtime_env=environment,
                    metadata=dict(metadata),
                    entrypoint_num_cpus=job.driver_cpus or None,
                )
        except ValueError as error:  # of the runtime environment
            raise JobRequestError(f"Ray refuses the job: {error}") from error

    def jobs(self) -> list[JobRecord]:
        """Return the submitted jobs, oldest first."""
        with _refusals(self.address):
            details = self._client.list_jobs()
        return sorted(map(_record, filter(_is_submitted, details)), key=lambda job: job.started_s)

    def job(self, job_id: str) -> JobRecord:
        """Return the record of a job.

        Raises:
            JobRequestError: there is no such job.
        """
        if not _JOB_ID.fullmatch(job_id):  # it becomes part of a URL
            raise JobRequestError(f"{job_id!r} is no job id; `rlpack jobs` lists them")
        with _refusals(self.address, job_id):
            return _record(self._client.get_job_info(job_id))

    def logs(self, job_id: str) -> str:
        """Return a job's output so far."""
        self.job(job_id)
        with _refusals(self.address, job_id):
            return self._client.get_job_logs(job_id) or ""

    def follow(self, job_id: str, show: Callable[[str], None]) -> JobRecord:
        """Pass a job's output to `show` until it ends, and return its final record.

        What `show` raises is raised as it is.

        Raises:
            JobRequestError: there is no such job.
            JobServerError: the server stopped answering.
        """
        self.job(job_id)
        asyncio.run(self._follow(job_id, show))
        return self._once_ended(job_id, _NOTED_S)

    def stop(self, job_id: str) -> bool:
        """Request that a job stop; return whether it was running."""
        with _refusals(self.address, job_id):
            return self._client.stop_job(job_id)

    def wait_until_stopped(self, job_id: str, timeout_s: float) -> JobRecord:
        """Wait for a job that is stopping and return its final record.

        Raises:
            JobServerError: it still runs after the timeout.
        """
        return self._once_ended(job_id, timeout_s + _NOTED_S)

    async def _follow(self, job_id: str, show: Callable[[str], None]) -> None:
        async with aclosing(self._texts(job_id)) as texts:
            async for text in texts:
                show(text)

    async def _texts(self, job_id: str) -> AsyncGenerator[str, None]:
        """Yield a job's output until it ends."""
        next_text: asyncio.Task[str | None] | None = None
        try:
            with _refusals(self.address, job_id):
                stream = self._client.tail_job_logs(job_id)
                while True:
                    next_text = next_text or asyncio.create_task(_next(stream))
                    done, _ = await asyncio.wait({next_text}, timeout=_SILENCE_S)
                    if not done and (await asyncio.to_thread(self.job, job_id)).has_ended:
                        return
                    if not done:
                        continue
                    text, next_text = next_text.result(), None
                    if text is None:
                        return
                    yield text
        finally:
            if next_text is not None:
                next_text.cancel()

    def _once_ended(self, job_id: str, timeout_s: float) -> JobRecord:
        """Return a job's record once it has ended."""
        deadline = time.monotonic() + timeout_s
        while not (job := self.job(job_id)).has_ended:
            if time.monotonic() > deadline:
                raise JobServerError(f"job {job_id} is {job.status} after {timeout_s:g} s; ask again: it may still end")
            time.sleep(_POLL_S)
        return job

    def _data(self, path: str) -> dict[str, Any]:
        """Return the data of a dashboard's answer."""
        response = self._client._do_request("GET", path)
        if response.status_code != 200:
            raise JobServerError(f"{self.address}{path} answers {response.status_code}: {response.text[:200]}")
        return response.json()["data"]


async def _next(stream: Any) -> str | None:
    return await anext(stream, None)


def _answers_anyone(address: str) -> bool:
    """Return whether a job server answers without a token."""
    try:
        answer = httpx.get(f"{address}/api/version", timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S))
    except httpx.HTTPError:
        return False
    return answer.is_success


def _http_address(address: str) -> str:
    """Return a job server's address with its scheme.

    Raises:
        JobRequestError: it is malformed.

    >>> _http_address("head:8265"), _http_address("https://ray.example.org/")
    ('http://head:8265', 'https://ray.example.org')
    """
    whole = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(whole)
        good = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or "://" in address)
    except ValueError:  # a port that is not a number
        good = False
    if not good:
        raise JobRequestError(
            f"--address is {address!r}; give the address of the cluster's job server (the Ray dashboard), such as "
            "http://head-node:8265"
        )
    return whole.rstrip("/")


@contextmanager
def _refusals(address: str, job_id: str = "") -> Iterator[None]:
    """Translate exceptions of Ray's client."""
    try:
        yield
    except AuthenticationError as error:
        refusal = "rejects the token" if "Authentication failed" in str(error) else "asks for a token"
        raise JobRequestError(
            f"{address} {refusal}; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file of the cluster's token "
            f"(or RAY_AUTH_TOKEN, or have it in ~/.ray/auth_token) ({_first_line(error)})"
        ) from error
    except (OSError, ClientError, TimeoutError) as error:  # requests' own errors are OSErrors
        raise JobServerError(f"{address} doesn't answer: {_first_line(error)}") from error
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise JobServerError(f"{address} sent an answer that Ray {ray.__version__} can't parse: {reason}") from error
    except (JobRequestError, JobServerError):
        raise
    except RuntimeError as error:
        if job_id and "status code 404" in str(error):
            raise JobRequestError(f"{address} has no job {job_id}; `rlpack jobs` lists those it has") from error
        raise JobServerError(f"{address} fails: {_last_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()[:_LONGEST] or type(error).__name__


def _last_line(error: Exception) -> str:
    """Return the last line of a text that may contain another process's traceback."""
    return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__


def _is_submitted(details: JobDetails) -> bool:
    return details.type == JobType.SUBMISSION and details.submission_id is not None


def _record(details: JobDetails) -> JobRecord:
    return JobRecord(
        id=details.submission_id or details.job_id or "",
        status=str(details.status.value),
        entrypoint=details.entrypoint,
        message=details.message or "",
        metadata=details.metadata or {},
        started_s=(details.start_time or 0) / 1000,
        ended_s=None if not details.end_time else details.end_time / 1000,
        exit_code=details.driver_exit_code,
    )

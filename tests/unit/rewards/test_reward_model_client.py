"""The client of a served reward model against a local server that answers well, badly or never."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlpack.rewards.errors import RewardError
from rlpack.rewards.reward_model_client import RewardModelClient
from rlpack.rewards.score_requests import RequestSettings

TIMEOUT_S = 0.4
# Answers by the first token of a row: status and body.
BROKEN: dict[int, tuple[int, str]] = {
    100: (500, "no"),
    101: (200, "<html>"),
    102: (200, '{"data": []}'),
    103: (200, '{"data": [{"probs": [1.0]}, {"probs": [2.0]}]}'),
    104: (200, '{"data": [{"probs": []}]}'),
    105: (200, '{"data": [{"probs": ["1"]}]}'),
    106: (200, '{"data": [{"probs": [true]}]}'),
    107: (200, '{"data": [{"probs": [null]}]}'),
    108: (200, '{"data": [{"probs": [NaN]}]}'),
    109: (200, '{"data": [{"probs": [-Infinity]}]}'),
    110: (200, '{"data": [{"probs": [1e39]}]}'),
    111: (200, '{"data": [{"probs": [0.25, 0.75]}]}'),
    112: (401, '{"error": "wrong token"}'),
    113: (404, '{"detail": "Not Found"}'),
    114: (400, "the maximum context length is 8"),
    115: (200, '{"data": [{"probs": [1' + 400 * "0" + "]}]}"),
}
NEVER, ONCE = 120, 121


class Server(ThreadingHTTPServer):
    """A server that scores a row with the sum of its tokens."""

    daemon_threads = True
    request_queue_size = 128
    released: threading.Event
    requests: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, "key": self.headers["Authorization"], **request})
        row = request["input"][0]
        if row[0] == NEVER:
            self.server.released.wait(30)
            return
        is_first = sum(other["input"] == [row] for other in self.server.requests) == 1
        good = 200, json.dumps({"data": [{"index": 0, "label": "LABEL_0", "probs": [sum(row)], "num_classes": 1}]})
        status, body = (503, "") if row[0] == ONCE and is_first else BROKEN.get(row[0], good)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as started:
        started.released, started.requests = threading.Event(), []
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield started
        started.released.set()
        started.shutdown()
        thread.join()


def settings(server: Server, **values: Any) -> RequestSettings:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return replace(RequestSettings(url, "model", timeout_s=TIMEOUT_S, retries=1, backoff_s=0.01), **values)


def ask(settings: RequestSettings, *rows: list[int], allowed: float = float("inf"), pad_token_id: int | None = None):
    async def asked():
        client = RewardModelClient(settings, allowed, pad_token_id=pad_token_id)
        return await client.score(rows), client.num_retries

    return asyncio.run(asked())


def test_each_row_is_sent_as_its_token_ids_and_gets_its_own_score(server):
    rows = [[1, 2, 3], [7], [5, 5]]
    results, retries = ask(settings(server, api_key="hush"), *rows)
    assert ([result.value for result in results], retries) == ([6.0, 7.0, 10.0], 0)
    assert sorted(request["input"][0] for request in server.requests) == sorted(rows)
    (request,) = {(r["path"], r["key"], r["model"], r["use_activation"]) for r in server.requests}
    assert request == ("/classify", "Bearer hush", "model", False)


def test_a_row_is_scored_at_its_last_token_that_is_not_padding(server):
    results, _ = ask(settings(server), [9, 4, 9, 9], [9, 9], [4, 1], [], pad_token_id=9)
    assert sorted(request["input"][0] for request in server.requests) == [[4, 1], [9], [9, 4]]
    assert [result.value for result in results[:3]] == [13.0, 9.0, 5.0]
    assert (results[3].problem, results[3].failed) == ("none", False)


@pytest.mark.parametrize(
    ("token", "problem", "retries", "detail"),
    [
        (100, "error", 1, "answered 500"),
        *((token, "error", 1, "answered without one score for one row") for token in range(101, 108)),
        (108, "invalid", 0, "gave the score nan"),
        (109, "invalid", 0, "gave the score -inf"),
        (110, "invalid", 0, "gave the score 1e+39"),
        (115, "invalid", 0, "gave the score 10000"),
        (NEVER, "timeout", 1, "did not answer within 0.4 s"),
    ],
)
def test_an_answer_without_a_score_is_a_counted_failure_of_its_row_alone(server, token, problem, retries, detail):
    begin = time.monotonic()
    (bad, good), counted = ask(settings(server), [token, 1], [3, 4])
    assert time.monotonic() - begin < 10.0  # the server itself waits for 30
    assert (bad.problem, bad.failed, good.value, counted) == (problem, True, 7.0, retries)
    assert detail in bad.detail


def test_a_server_that_recovers_is_asked_again(server):
    (result,), retries = ask(settings(server, retries=3), [ONCE, 1])
    assert (result.value, retries) == (ONCE + 1.0, 1)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (111, r"gave 2 scores for a row, so its model has more than one label"),
        (112, r"answered 401 .*check judge\.url, judge\.model and judge\.api_key_env"),
        (113, r"answered 404 "),
        (114, r"answered 400 .*maximum context length is 8.*; if the row is too long, .*rlpack serve --max-length"),
    ],
)
def test_what_no_retry_can_change_is_one_error(server, token, words):
    with pytest.raises(RewardError, match=words):
        ask(settings(server, concurrency=1), [token], [3], [3])
    assert len(server.requests) == 1


def test_a_server_that_is_gone_is_a_counted_failure():
    nowhere = RequestSettings("http://127.0.0.1:9/v1", "model", retries=2, backoff_s=0.01)
    (result,), retries = ask(nowhere, [1])
    assert (result.problem, retries) == ("error", 2)
    assert "ConnectError" in result.detail


def test_a_batch_with_too_many_failures_is_abandoned(server):
    results, _ = ask(settings(server, retries=0, concurrency=2), *([[100]] * 40), allowed=2)
    assert len(server.requests) <= 5
    assert all(result.failed for result in results)

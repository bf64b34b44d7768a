"""Scoring roles that call a server, in the background of a rank: the requests of several calls overlap."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.distributed.context import RankContext
from rlpack.distributed.process import RankProcess
from rlpack.rewards.errors import RewardError
from rlpack.rewards.judge_client import JudgeSettings
from rlpack.rewards.request_loop import THREAD
from rlpack.rewards.score_requests import RequestSettings
from rlpack.workers.judge import JudgeWorker
from rlpack.workers.served_reward_model import ServedRewardModelWorker

WAIT_S = 30.0
# Scores of a row; one of these is refused for all.
REFUSED, FAILS = 9, 8


class Server(ThreadingHTTPServer):
    """Scores a row as the row says, once as many requests are in flight as it waits for."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, awaited: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.awaited = awaited
        self.changed = threading.Condition()
        self.in_flight = self.most_in_flight = 0

    def await_requests(self, count: int, timeout_s: float = WAIT_S) -> bool:
        """Wait until this many requests have been in flight at once."""
        with self.changed:
            return self.changed.wait_for(lambda: self.most_in_flight >= count, timeout_s)

    def release(self) -> None:
        """Answer all requests from now on."""
        with self.changed:
            self.awaited = 0
            self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        score = request["input"][0][0] if "input" in request else int(request["messages"][0]["content"])
        server = self.server
        with server.changed:
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            server.changed.notify_all()
            if score not in (REFUSED, FAILS):
                server.changed.wait_for(lambda: server.most_in_flight >= server.awaited, 5.0)
                server.changed.wait_for(lambda: server.in_flight > server.awaited > 0, 0.02)  # too many would come now
            server.in_flight -= 1
        answer = {"data": [{"probs": [score]}], "choices": [{"message": {"content": f"Score: {score}"}}]}
        body = json.dumps(answer).encode()
        self.send_response({REFUSED: 401, FAILS: 500}.get(score, 200))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[int], Server]]:
    running: list[tuple[Server, threading.Thread]] = []

    def start(awaited: int) -> Server:
        server = Server(awaited)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.release()
        server.shutdown()
        thread.join()
        server.server_close()


def judge(url: str, concurrency: int) -> JudgeWorker:
    settings = JudgeSettings(
        url, "model", concurrency=concurrency, retries=0, prompt_template="{completion}", max_score=1.0 * FAILS
    )
    return JudgeWorker(RankContext(), settings, weight=1.0, max_failures=0.1)


def served_model(url: str, concurrency: int) -> ServedRewardModelWorker:
    settings = RequestSettings(url, "model", concurrency=concurrency, retries=0)
    return ServedRewardModelWorker(RankContext(), settings, weight=1.0 / FAILS, max_failures=0.1)


ROLES = pytest.mark.parametrize("build", [judge, served_model])
Build = Callable[[str, int], JudgeWorker | ServedRewardModelWorker]


class Rank:
    """A rank with a scoring role that calls a server."""

    def __init__(self, build: Build, server: Server, concurrency: int) -> None:
        self.process = RankProcess(RankContext(), threads=torch.get_num_threads())
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        self.process._roles["judge"] = build(url, concurrency)
        self._num_calls = 0

    def submit(self, *scores: int) -> int:
        """Submit a call with a row for each score, and return its id."""
        self._num_calls += 1
        tokens = Ragged.from_rows([torch.tensor([score]) for score in scores])
        columns = {"completion": [str(score) for score in scores], "input_ids": tokens}
        shard = BatchedDataDict(columns, row_ids=range(len(scores)))
        self.process.submit(self._num_calls, "judge", "score", {}, shard)
        return self._num_calls

    def rewards(self, call_id: int) -> list[float]:
        """Wait for a call, and return its rewards as the scores that the rows named."""
        rows = self.process.result(call_id, WAIT_S)
        assert rows is not None
        return (rows.stub["rewards"] * FAILS).tolist()


@ROLES
def test_requests_of_two_calls_are_in_flight_together(build: Build, serve):
    server = serve(awaited=8)
    rank = Rank(build, server, concurrency=16)
    calls = [rank.submit(1, 2, 3, 4), rank.submit(4, 3, 2, 1)]
    assert [rank.rewards(call) for call in calls] == [[1, 2, 3, 4], [4, 3, 2, 1]]
    assert server.most_in_flight == 8


@ROLES
def test_calls_have_no_more_requests_in_flight_than_the_role_allows(build: Build, serve):
    server = serve(awaited=3)
    rank = Rank(build, server, concurrency=3)
    calls = [rank.submit(1, 2, 3, 4) for _ in range(6)]
    assert [rank.rewards(call) for call in calls] == [[1, 2, 3, 4]] * 6
    assert server.most_in_flight == 3


@ROLES
def test_a_slow_answer_does_not_hold_up_later_calls(build: Build, serve):
    server = serve(awaited=100)  # nothing is answered but what fails
    rank = Rank(build, server, concurrency=2)
    slow = rank.submit(5)
    assert server.await_requests(1)
    for _ in range(2):
        assert rank.rewards(rank.submit(FAILS, FAILS)) == [0, 0]
    assert isinstance(rank.process.result(slow, 0.0), float)
    server.release()
    assert rank.rewards(slow) == [5]


@ROLES
def test_an_error_of_one_call_does_not_disturb_another(build: Build, serve):
    server = serve(awaited=100)
    rank = Rank(build, server, concurrency=4)
    other = rank.submit(1, 2)
    assert server.await_requests(2)
    refused = rank.submit(3, REFUSED, 4)
    with pytest.raises(RewardError, match="answered 401"):
        rank.process.result(refused, WAIT_S)
    server.release()
    assert rank.rewards(other) == [1, 2]
    assert rank.rewards(rank.submit(5, 6, 7, 1)) == [5, 6, 7, 1]  # its slots are free again


@ROLES
def test_no_thread_is_left_once_a_role_is_idle_and_its_rank_closed(build: Build, serve):
    rank = Rank(build, serve(awaited=0), concurrency=4)
    for call in [rank.submit(1) for _ in range(8)]:
        assert rank.rewards(call) == [1]
    (threads,) = rank.process._threads.values()
    started = [*threads._threads, *(thread for thread in threading.enumerate() if thread.name == THREAD)]
    assert len(started) <= 5
    rank.process.close()
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()

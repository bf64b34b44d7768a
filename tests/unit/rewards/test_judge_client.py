"""The judge client against a local server that answers well, badly or never."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlpack.config.schema import Judge
from rlpack.rewards.errors import RewardError
from rlpack.rewards.judge_client import JudgeClient, JudgeSettings, check_prompt_template, parse_score, placeholders
from rlpack.rewards.score_requests import api_key

TIMEOUT_S = 0.4


class Server(ThreadingHTTPServer):
    """A server that behaves as the text of each request says."""

    daemon_threads = True
    request_queue_size = 128
    released: threading.Event
    requests: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][0]["content"]
        self.server.requests.append({"path": self.path, "key": self.headers["Authorization"], **request})
        seen = sum(other["messages"] == request["messages"] for other in self.server.requests)
        if "never" in text:
            self.server.released.wait(30)
            return
        if "drips" in text:
            self.drip()
            return
        status = next((code for code in (500, 503, 401, 400, 422) if str(code) in text), 200)
        if "once" in text and seen > 1:
            status = 200
        bodies = {"nonsense": "<html>", "list": "[1]", "null": '{"choices": [{"message": {"content": null}}]}'}
        bodies["reasoning"] = '{"choices": [{"message": {"content": null}, "finish_reason": "length"}]}'
        body = next((body for word, body in bodies.items() if word in text), None)
        if "huge" in text:
            body = " " * (5 << 20)
        score = "I can't say" if "mute" in text else f"Well. Score: {text[-1]}"
        choice = {"message": {"content": score}, "finish_reason": "length" if "cut" in text else "stop"}
        self.reply(status, body or json.dumps({"choices": [choice]}))

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def drip(self):
        """Send a byte now and then, so that no single read is late."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        try:
            while not self.server.released.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()
        except OSError:
            pass

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


def settings(server: Server, **values: Any) -> JudgeSettings:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1/"
    first = JudgeSettings(url, "model", prompt_template="{completion}", timeout_s=TIMEOUT_S, retries=1, backoff_s=0.01)
    return replace(first, **values)


def ask(settings: JudgeSettings, *texts: str, allowed: float = float("inf")):
    async def asked():
        judge = JudgeClient(settings, allowed)
        return await judge.score({"completion": texts}, len(texts)), judge.num_retries

    return asyncio.run(asked())


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_scores_come_back_in_order_as_shares_of_the_largest(server):
    results, retries = ask(settings(server, api_key="hush", max_tokens=7), *"0589")
    assert [result.value for result in results] == [0.0, 0.5, 0.8, 0.9]
    assert retries == 0
    (request,) = {(r["path"], r["key"], r["model"], r["max_tokens"], r["temperature"]) for r in server.requests}
    assert request == ("/v1/chat/completions", "Bearer hush", "model", 7, 0.0)


def test_the_score_of_an_answer_that_was_cut_off_does_not_count(server):
    (cut, whole), _ = ask(settings(server, max_tokens=7), "cut 1", "whole 1")
    assert (cut.value, cut.problem, whole.value) == (0.0, "invalid", 0.1)
    assert cut.detail.startswith("its answer was cut off at judge.max_tokens (7); raise it: 'Well. Score: 1'")


def test_an_api_key_is_read_without_line_breaks_and_never_shown():
    assert api_key("KEY", {"KEY": "sk-secret\n"}) == "sk-secret"
    for key in ("sk secret", "sk-sécret", "sk-\x00secret"):
        with pytest.raises(RewardError, match=r"judge\.api_key_env is 'KEY'.* printable ASCII") as error:
            api_key("KEY", {"KEY": key})
        assert "cret" not in str(error.value)
    for empty in ({}, {"KEY": " \n"}):
        with pytest.raises(RewardError, match="isn't set"):
            api_key("KEY", empty)


@pytest.mark.parametrize(
    ("max_score", "text", "share"),
    [
        (10.0, "to 10 (perfect)", 0.1),
        (1.0, "to 1 (perfect)", 1.0),
        (2.5, "to 2.5 (", 0.4),
        (1e9, "to 1000000000 (", 1e-9),
    ],
)
def test_the_default_prompt_names_the_highest_score(server, max_score: float, text: str, share: float):
    template = Judge().prompt_template + "{completion}"  # the server's score is the last letter
    client = JudgeClient(settings(server, prompt_template=template, max_score=max_score))
    (result,) = asyncio.run(client.score({"prompt": ["p"], "completion": ["1"]}, 1))
    assert text in server.requests[0]["messages"][0]["content"]
    assert result.value == share


def test_a_proxy_is_not_asked_for_a_server_of_this_machine(server, monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nothing listens there
    results, _ = ask(settings(server), "5")
    assert [result.value for result in results] == [0.5]


@pytest.mark.parametrize("url", ["http://localhost:80x/v1", "http://[::1/v1"])
def test_an_address_that_is_none_fails_rows_and_is_named(server, url: str):
    (result,), _ = ask(settings(server, url=url), "5")
    assert result.problem == "error"
    assert result.detail.startswith(f"{url}/chat/completions: InvalidURL")


def test_the_judge_reads_a_chat_prompt_as_a_line_for_each_message(server):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    columns = {"completion": ["5", "6"], "prompt": [messages, "2+2="], "answer": [[1], 4]}
    client = JudgeClient(settings(server, prompt_template="{prompt} {answer} {completion}"))
    results = asyncio.run(client.score(columns, 2))
    assert [result.value for result in results] == [0.5, 0.6]
    sent = {request["messages"][0]["content"] for request in server.requests}
    assert sent == {"system: Add.\nuser: 1+1= [1] 5", "2+2= 4 6"}


def test_a_text_with_an_unpaired_surrogate_is_sent_and_scored(server):
    (result,), _ = ask(settings(server), "a\ud800 7")
    assert result.value == 0.7
    assert server.requests[0]["messages"][0]["content"] == "a\ud800 7"


@pytest.mark.parametrize(
    ("text", "problem", "retries", "detail"),
    [
        ("500", "error", 1, "answered 500"),
        ("503", "error", 1, "answered 503"),
        ("400", "error", 0, "answered 400"),
        ("422", "error", 0, "answered 422"),
        ("nonsense", "error", 1, "no chat completion: '<html>'"),
        ("list", "error", 1, "no chat completion"),
        ("null", "invalid", 0, "no score from 0 to 10 in ''"),
        ("reasoning", "invalid", 0, "cut off at judge.max_tokens (512); raise it"),
        ("huge", "error", 1, "more than 4194304 bytes"),
        ("mute", "invalid", 0, "no score from 0 to 10 in \"I can't say"),
        ("drips", "timeout", 1, "did not answer within 0.4 s"),
        ("never", "timeout", 1, "did not answer within 0.4 s"),
    ],
)
def test_an_answer_without_a_score_is_a_counted_failure_of_its_row_alone(server, text, problem, retries, detail):
    with at_most(2 * TIMEOUT_S + 1.0):
        (bad, good), counted = ask(settings(server), text, "7")
    assert (bad.problem, bad.failed, good.value, counted) == (problem, True, 0.7, retries)
    assert detail in bad.detail


def test_a_server_that_recovers_is_asked_again(server):
    (result,), retries = ask(settings(server, retries=3), "500 once 6")
    assert (result.value, retries) == (0.6, 1)


def test_a_wrong_key_is_one_error_and_not_asked_again(server):
    with pytest.raises(RewardError, match=r"answered 401 .*check judge\.url, judge\.model and judge\.api_key_env"):
        ask(settings(server, api_key="hush", concurrency=1), "401", "7", "7")
    assert len(server.requests) == 1


def test_a_refused_connection_is_a_counted_failure(server):
    nowhere = settings(server, url="http://127.0.0.1:9/v1")
    with at_most(2.0):
        (result,), retries = ask(nowhere, "7")
    assert (result.problem, retries) == ("error", 1)
    assert "ConnectError" in result.detail


def test_a_batch_with_too_many_failures_is_abandoned(server):
    with at_most(3 * TIMEOUT_S + 1.0):
        results, _ = ask(settings(server, retries=0, concurrency=2), *["never"] * 40, allowed=2)
    assert len(server.requests) <= 4
    assert Counter(result.problem for result in results)["error"] >= 36


def test_the_key_is_not_shown(server):
    assert "hush" not in repr(settings(server, api_key="hush"))


def test_requests_wait_side_by_side(server):
    with at_most(TIMEOUT_S + 1.0):
        results, _ = ask(settings(server, retries=0, concurrency=8), *["never"] * 8)
    assert [result.problem for result in results] == ["timeout"] * 8


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: 7", 7.0),
        ("**Score:** 7.5", 7.5),
        ("score = 0", 0.0),
        ("Score: 3 … no, Score: 4/10", 4.0),
        ("Score: 11", None),
        ("Score: -1", None),
        ("**Score**: 8", 8.0),
        ("__Score__: 8", 8.0),
        ("Score: <8>", 8.0),
        ("Score: `8`", 8.0),
        ("Score: [8]/10.", 8.0),
        ('{"score": 8}', 8.0),
        ("Score：8.", 8.0),
        ("Score: 8 (max score: 10)", 8.0),
        ('{"score": 8, "max_score": 10}', 8.0),
        ("Score: 8, of a possible score: 10", 8.0),
        ("Score: 8 (min score: 0, max. score: 10)", 8.0),
        ("Score: 8. **Maximum** score: 10; passing score: 5; top score: 10", 8.0),
        ("Score: 8, full  score: 10", 8.0),
        ('{"overallScore": 8, "maxScore": 10}', 8.0),
        ('{"final_score": 8, "max_score": 10}', 8.0),
        ("FINAL SCORE: 8", 8.0),
        ("Total score: 8/10", 8.0),
        ("Underscore: 8", None),
        ("Score: 8\nFinal score: 1,000", None),
        ("Score: 8. Final **Score**: 1e1", None),
        ("Score: 8, as the score: it adds well", 8.0),
        ("Score: 7.5e3", None),
        ("Score: 7,5", None),
        ("Score: 1,000", None),
        ("Score: nan", None),
        ("Score: 1e9999", None),
        ("Score: " + "9" * 5000, None),
        ("7", None),
        ("", None),
    ],
)
def test_the_last_score_counts_if_it_is_in_bounds(answer, score):
    assert parse_score(answer, 10.0) == score


@pytest.mark.parametrize(
    "prompt_template", ["{", "{completion.__class__}", "{0}", "{completion!r}", "{}", "{completion:9}"]
)
def test_a_template_with_more_than_names_is_refused(prompt_template):
    with pytest.raises(RewardError, match=r"judge\.prompt_template"):
        placeholders(prompt_template)


def test_a_template_names_columns_that_exist():
    check_prompt_template("{prompt} {completion} {answer} {{}}", ["answer"])
    check_prompt_template("{completion} {max_score}", [])
    assert placeholders("{completion} {max_score} {answer}") == ["completion", "answer"]
    with pytest.raises(RewardError, match=r"names \{anser\}; the dataset has the columns \['answer', 'completion'"):
        check_prompt_template("{completion} {anser}", ["answer"])
    with pytest.raises(RewardError, match=r"doesn't name \{completion\}"):
        check_prompt_template("{prompt}", [])
    check_prompt_template("{completion} of 10", ["max_score"])
    with pytest.raises(RewardError, match=r"names \{max_score\}, which is judge\.max_score, but .* a column max_score"):
        check_prompt_template("{completion} of {max_score}", ["max_score"])

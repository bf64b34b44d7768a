"""Runs whose rewards come from several functions and a judge, some of which hang, die or answer nonsense."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.end_to_end.commands import MARK, done, records, started
from tests.end_to_end.settings import EASY

pytestmark = [pytest.mark.ray, pytest.mark.slow]
REWARDS = """
import os

def odd(prompt, completion, uid):
    if uid.endswith("-3"):
        os._exit(1)
    while uid.endswith("-5"):
        pass
    return len(completion) / 100

def broken(completions):
    raise KeyError("no such column")

async def none(completion):
    return None
"""
SMALL = (
    *EASY,
    f"reward.env_vars=[{MARK}]",  # so that a process that is left behind is found
    "sft_warmup.steps=1",
    "sft_warmup.batch_size=4",
    "trainer.steps=1",
    "trainer.prompts_per_step=64",
    "trainer.group_size=2",
    "reward.timeout_s=0.5",
    "placement.object_store_gb=0.1",
)


class Judge(BaseHTTPRequestHandler):
    """Gives every response 5 of 10, after an error at the first request."""

    seen: list[str]

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(self.headers["Authorization"])
        assert "<response>" in request["messages"][0]["content"]
        body = json.dumps({"choices": [{"message": {"content": "Score: 5"}}]}).encode()
        self.send_response(500 if len(self.seen) == 1 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


@contextmanager
def judge() -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    with Server(("127.0.0.1", 0), type("Handler", (Judge,), {"seen": seen})) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
        server.shutdown()
        thread.join()


def test_functions_and_a_judge_are_summed_and_what_fails_is_counted(tmp_path, monkeypatch):
    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    monkeypatch.setenv("JUDGE_KEY", "hush")
    with judge() as (url, seen):
        run = done(
            tmp_path,
            *SMALL,
            "sft_warmup.steps=0",  # before which all would be tried, and the judge's first error be spent
            "+reward.functions.answer.function=rlpack.rewards.functions:final_answer",
            "+reward.functions.answer.weight=0.5",
            "+reward.functions.odd.function=odd_rewards:odd",
            "+reward.functions.silent.function=odd_rewards:none",
            "+roles.judge.target=rlpack.workers.judge:JudgeWorker",
            f"judge.url={url}",
            "judge.model=any",
            "judge.api_key_env=JUDGE_KEY",
            "judge.weight=2.0",
            "judge.backoff_s=0.01",
        )
    (record,) = [record for record in records(run.run_dir) if record["phase"] == "train"]
    # Each of 64 prompts comes once, with two responses.
    assert (record["reward/killed"], record["reward/timeouts"], record["reward/quarantined"]) == (2, 2, 4)
    assert (record["reward/errors"], record["reward/invalid"], record["reward/retries"]) == (0, 0, 1)
    assert record["reward/functions/judge"] == pytest.approx(0.5)
    assert 0 < record["reward/functions/odd"] <= 0.12
    assert "reward/functions/silent" not in record  # it gave no number
    assert record["reward/min"] >= 1.0
    assert set(seen) == {"Bearer hush"}
    assert "hush" not in "".join(path.read_text() for path in run.run_dir.glob("*.[yj]*"))


def test_a_function_that_always_fails_ends_the_run_with_one_error_before_the_first_step(tmp_path):
    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    with started(tmp_path, *SMALL, "reward.function=odd_rewards:broken", ranks=1) as run:
        assert run.wait() == 1
        assert run.left_behind() == []
    assert records(run.run_dir) == []
    told = "role reward, rank 0, in score: on 16 demonstrations, tried before the first step: TooManyFailuresError"
    assert told in run.err
    assert re.search(r"odd_rewards:broken on row \d+ \(prompt \S+\): error \(KeyError: 'no such column' \(", run.err)

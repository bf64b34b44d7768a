"""What `rlpack submit` and its like refuse without a cluster; with one: tests/end_to_end/test_jobs.py."""

import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import ClientConnectionError

from rlpack.cli import job_commands
from rlpack.cli.main import main
from rlpack.distributed.jobs import client as jobs

ROW = {"prompt": "a1b2=", "answer": "3"}
JSONL = ("data=jsonl", "data.source=rows.jsonl", "data.validation_source=rows.jsonl")
PRETRAINED = "model=pretrained"
RUN_DIR = "run_dir=/shared/run"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory of the command, from which no server can be reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    (tmp_path / "rows.jsonl").write_text(32 * (json.dumps(ROW) + "\n"))
    (tmp_path / "arithmetic").mkdir()
    (tmp_path / "arithmetic" / "notes.txt").touch()
    (tmp_path / "prompts").mkdir()
    pq.write_table(pa.Table.from_pylist([ROW] * 32), tmp_path / "prompts" / "train.parquet")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 3\n")
    return tmp_path


@contextmanager
def server(status: int, body: bytes, without_token: int | None = None) -> Iterator[str]:
    """Answer every request alike, and give the address; what Ray's client does not ask may get another status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_ours = "httpx" in self.headers["User-Agent"]
            self.send_response(without_token if is_ours and without_token else status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def said(capsys, code, *words):
    assert main(list(words)) == code
    heard = capsys.readouterr()
    assert heard.out == ""
    return heard.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("trainer.stepz=1", RUN_DIR), 2, "trainer.stepz is not a key; did you mean trainer.steps?"),
        (("trainer.steps=-1", RUN_DIR), 2, "trainer.steps is -1"),
        ((RUN_DIR, "roles.judge.target=my_judge:Judge"), 2, "there is no module my_judge"),
        (
            (),
            2,
            "run_dir is null, but a job's working directory is deleted when it ends; set run_dir to an absolute path",
        ),
        (("run_dir=runs/mine",), 2, "run_dir is runs/mine, but a job's working directory is deleted"),
        (("run_dir='~/mine'",), 2, "run_dir is ~/mine, but a job's working directory is deleted"),
        ((RUN_DIR, "placement.address=other:6379"), 2, "placement.address=other:6379: a job joins the cluster"),
        ((RUN_DIR, "placement.object_store_gb=1"), 2, "placement.object_store_gb is 1, but placement.address joins"),
        ((RUN_DIR, "seed=1,2", "--multirun"), 2, "a job is one run"),
        ((RUN_DIR, "job.working_dir=nowhere"), 2, "job.working_dir is 'nowhere', but there is no such folder"),
        ((RUN_DIR, "job.working_dir='~nobody-here'"), 2, "'~nobody-here', but there is no such folder"),
        (
            (RUN_DIR, *JSONL, "data.source='~nobody-here/rows.jsonl'"),
            3,
            "data.source is '~nobody-here/rows.jsonl', which would not be upload",
        ),
        ((RUN_DIR, "job.env_vars.HF_TOKEN=abc"), 2, "set job.secret_names=[HF_TOKEN]"),
        ((RUN_DIR, "job.stop_timeout_s=0"), 2, "job.stop_timeout_s is 0"),
        ((RUN_DIR, *JSONL, "job.excludes=['*.jsonl']"), 3, "data.source is 'rows.jsonl', which would not be uploaded"),
        (
            (RUN_DIR, *JSONL, "data.source=missing.jsonl"),
            3,
            "data.source is 'missing.jsonl', which would not be upload",
        ),
        (
            (RUN_DIR, *JSONL, "data.source=../rows.jsonl"),
            3,
            "data.source is '../rows.jsonl', which would not be upload",
        ),
        (
            (RUN_DIR, *JSONL, "data.source=prompts", "job.excludes=['/prompts/*.parquet']"),
            3,
            "job.excludes matches its files; put it there, or set the absolute path of a folder on storage",
        ),
        ((RUN_DIR, *JSONL, "data.validation_source=.."), 3, "it is outside of that folder; put it there"),
        (
            (RUN_DIR, "--config-dir", "conf", "experiment=mine", "job.excludes=['/conf']"),
            2,
            "the folder of presets 'conf' would not be uploaded with",
        ),
        # All is well here, so it is the server that is missed.
        ((RUN_DIR, "--config-dir=conf", "experiment=mine"), 2, "no Ray job server answers at"),
        ((RUN_DIR, *JSONL, "data.source=prompts/"), 2, "no Ray job server answers at"),
        ((RUN_DIR, "job.excludes=[/arithmetic]"), 2, "no Ray job server answers at"),
        ((RUN_DIR, *JSONL), 2, "no Ray job server answers at http://127.0.0.1:1 (Failed to connect"),
        ((RUN_DIR, *JSONL, "data.source=/shared/rows.jsonl"), 2, "no Ray job server answers at"),
        ((RUN_DIR, "job.working_dir=null", "job.secret_names=[HERE_UNKNOWN]"), 2, "no Ray job server answers at"),
    ],
)
def test_a_job_is_checked_before_a_server_is_asked(folder, capsys, words, code, message):
    began = time.monotonic()
    heard = said(capsys, code, "submit", "--", *words)
    assert message in heard
    assert heard.count("rlpack submit: ") == 1
    assert time.monotonic() - began < 60


MODULE = """
import torch_of_the_nodes

def needs_more(prompts, completions, difficulty): ...
def odd(text): ...

class Judge:
    pass
"""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("reward.function=uploaded:missing",), 2, "uploaded has no missing; its functions are: needs_more, odd"),
        (("reward.function=uploaded:odd",), 2, "reward.function=uploaded:odd doesn't name the texts that it takes"),
        (
            (*JSONL, "reward.function=uploaded:needs_more"),
            2,
            "reward.function=uploaded:needs_more needs 'difficulty'; the dataset has the columns ['answer'",
        ),
        (("roles.judge.target=uploaded:Other",), 2, "uploaded has no class Other"),
        (("roles.judge.target=uploaded:Judge",), 2, "'uploaded:Judge', which has no method from_settings"),
        (("algorithm.loss=uploaded:missing",), 2, "algorithm.loss is 'uploaded:missing', but uploaded has no function"),
        ((*JSONL, "data.prompt_column=question"), 3, "rows.jsonl:1 has no column 'question'; it has prompt, answer"),
        ((*JSONL, "trainer.prompts_per_step=33"), 2, "trainer.prompts_per_step is 33, but rows.jsonl has 32 rows"),
        (("model.config.num_attention_heads=3",), 2, "num_attention_heads (3) is not divisible by"),
        (("actor.optimizer.freeze=[nothing*]",), 2, "actor.optimizer.freeze contains 'nothing*', which matches no"),
        # What only the cluster has is left to the job.
        (
            (
                *JSONL,
                "data.source=/shared/a.jsonl",
                "data.validation_source=/shared/a.jsonl",
                PRETRAINED,
                "model.path=/m",
            ),
            2,
            "no Ray job server answers at",
        ),
        (
            (*JSONL, "data.source=owner/a", "data.validation_source=owner/a", PRETRAINED, "model.path=owner/model"),
            2,
            "no Ray job server answers at",
        ),
        (("reward.function=uploaded:missing", "job.working_dir=null"), 2, "no Ray job server answers at"),
    ],
)
def test_uploaded_files_are_checked_without_importing_them(folder, capsys, words, code, message):
    (folder / "uploaded.py").write_text(MODULE)
    assert message in said(capsys, code, "submit", "--", RUN_DIR, *words)
    assert "uploaded" not in sys.modules


def test_the_files_that_are_checked_are_those_of_the_uploaded_folder(folder, capsys):
    (folder / "rows.jsonl").unlink()
    inner = folder / "inner"
    inner.mkdir()
    (inner / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (inner / "inner_rewards.py").write_text("def score(text): ...\n")
    words = ("submit", "--", RUN_DIR, *JSONL, "job.working_dir=inner", "trainer.prompts_per_step=1")
    assert "rows.jsonl:1 has no column 'prompt'; it has question" in said(capsys, 3, *words)
    words = (*words, "data.prompt_column=question")
    assert "no Ray job server answers" in said(capsys, 2, *words)
    assert "doesn't name the texts" in said(capsys, 2, *words, "reward.function=inner_rewards:score")


def test_a_recipe_in_the_working_directory_is_found_and_has_to_be_uploaded(folder, capsys):
    (folder / "submitted_recipe.py").write_text("from rlpack.recipes.grpo_spec import SPEC\ndef main(config): ...\n")
    words = ("submit", "--", RUN_DIR, "recipe.target=submitted_recipe")
    assert "no Ray job server answers" in said(capsys, 2, *words)
    message = f"recipe.target is 'submitted_recipe', but {folder}/submitted_recipe.py isn't uploaded"
    assert message in said(capsys, 2, *words, "job.excludes=['submitted_*']")


def test_optional_packages_are_those_of_the_nodes_not_of_the_machine_that_submits(folder, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    heard = said(capsys, 2, "submit", "--", *JSONL, RUN_DIR, "logger.wandb=offline")
    assert "no Ray job server answers" in heard
    assert "wandb" not in heard


def test_a_module_that_would_stay_behind_is_named(folder, capsys):
    (folder / "my_rewards.py").write_text("def score(prompts, completions, **columns): ...\n")
    words = ("submit", "--", RUN_DIR, "reward.function=my_rewards:score")
    assert "no Ray job server answers" in said(capsys, 2, *words)
    (folder / ".gitignore").write_text("my_*\n")
    assert f"reward.function is 'my_rewards:score', but {folder}/my_rewards.py isn't uploaded" in said(
        capsys, 2, *words
    )


@pytest.mark.parametrize("words", [("jobs",), ("logs", "an_id"), ("stop", "an_id"), ("logs", "an_id", "--follow")])
def test_an_address_where_nobody_answers_is_said(folder, capsys, words):
    assert "no Ray job server answers at http://127.0.0.1:1 (" in said(capsys, 2, *words)


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "head", "http://", "http://head:port", "anyscale://x"])
def test_what_is_no_address_of_a_job_server_is_refused(folder, capsys, address):
    heard = said(capsys, 2, "jobs", "--address", address)
    assert f"--address is {address!r}; give the address of the cluster's job server" in heard


def test_a_server_that_never_answers_is_given_up_at_the_deadline(folder, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "_ANSWER_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        heard = said(capsys, 2, "jobs", "--address", f"127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - began < 5
    assert "no Ray job server answers at" in heard
    assert "timed out" in heard


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, b""), (500, b"broken"), (200, b"<html>a page</html>"), (200, b"{}"), (200, b'{"ray_version": "1.0.0"}')],
)
def test_another_kind_of_server_is_no_job_server(folder, capsys, status, body):
    with server(status, body) as address:
        assert f"no Ray job server answers at {address} (" in said(capsys, 2, "jobs", "--address", address)


def test_a_server_that_asks_no_token_is_warned_of_unless_it_is_on_this_machine(folder, caplog, monkeypatch):
    with server(200, b'{"ray_version": "2.60.0"}') as here:
        jobs.JobServer(here)
        assert caplog.text == ""
        # No other machine can be asked in a test, so this one's name stands for one.
        monkeypatch.setattr(jobs, "_SECURE_HOSTS", ())
        jobs.JobServer(here)
        assert f"{here} takes jobs without a token: anyone who reaches it can run code there" in caplog.text
    caplog.clear()
    with server(200, b'{"ray_version": "2.60.0"}', without_token=401) as here:
        jobs.JobServer(here)
        assert caplog.text == ""


@pytest.mark.parametrize("name", ["../x", "a b", ""])
def test_what_can_be_no_job_is_not_asked_for(folder, capsys, name):
    with server(200, b'{"ray_version": "2.60.0"}') as address:
        assert f"{name!r} is no job id" in said(capsys, 2, "logs", name, "--address", address)


def test_a_server_that_fails_later_is_the_servers_fault(folder, capsys):
    with server(200, b'{"ray_version": "2.60.0"}') as address:
        assert f"{address} sent an answer that Ray" in said(capsys, 1, "jobs", "--address", address)
        assert "job an_id may still be running; check with rlpack logs an_id" in said(
            capsys, 1, "logs", "an_id", "--address", address
        )


def followed(capsys, monkeypatch, lines, show):
    """Follow a running job whose log is `lines`, an error among them; return the exit code and what is on stderr."""

    class Client:
        def get_job_info(self, job_id):
            return SimpleNamespace(
                **dict.fromkeys(("job_id", "message", "metadata", "end_time", "driver_exit_code")),
                submission_id=job_id,
                entrypoint="",
                start_time=1,
                status=SimpleNamespace(value="RUNNING"),
            )

        async def tail_job_logs(self, job_id):
            for line in lines:
                if isinstance(line, Exception):
                    raise line
                yield line

    connected: Any = jobs.JobServer.__new__(jobs.JobServer)
    connected.address, connected._client = "http://head:8265", Client()
    monkeypatch.setattr(job_commands, "_server", lambda arguments: connected)
    monkeypatch.setattr(job_commands, "_show", show)
    return job_commands.run_command(["logs", "an_id", "--follow"]), capsys.readouterr().err


def test_an_output_that_is_closed_is_not_the_servers_fault(capsys, monkeypatch):
    def show(text):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):  # `main` exits with 141
        followed(capsys, monkeypatch, ["a line"], show)


@pytest.mark.parametrize(
    ("lines", "failure", "message"),
    [
        (["a line"], OSError(28, "No space left on device"), "rlpack logs: [Errno 28] No space left on device; job an"),
        (
            [ClientConnectionError("cut")],
            None,
            "rlpack logs: http://head:8265 doesn't answer: cut; job an_id may still",
        ),
    ],
)
def test_a_log_that_ends_early_is_blamed_on_the_side_that_failed(capsys, monkeypatch, lines, failure, message):
    def show(text):
        raise failure

    code, heard = followed(capsys, monkeypatch, lines, show)
    assert code == 1
    assert heard.startswith(message)

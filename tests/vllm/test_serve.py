"""`rlpack serve` with vLLM itself: a model whose answer is known, a judge that asks it, and signals that end it."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.compose import compose
from rlpack.data.tokenization import character_tokenizer
from rlpack.rollout.vllm.vllm_package import installation_problem
from rlpack.worker import RankContext
from rlpack.workers.judge import JudgeWorker

PROBLEM = installation_problem(on_gpu=False)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
    pytest.mark.filterwarnings("ignore"),
]

ANSWER = "Score: 7"  # no character twice, and the one after each is its only successor
TOKENIZER = character_tokenizer("\nScore: 7abdfghijklmnpqtuvwxyz012345689+-=.,<>/`()")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '\\n' }}"
START_S = 400.0


class Served(NamedTuple):
    """A running command: its process, what it has printed, and what a shell with its lines has in the environment."""

    process: "subprocess.Popen[str]"
    printed: str
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        return self.environment["OPENAI_BASE_URL"]

    @property
    def token(self) -> str:
        return self.environment["OPENAI_API_KEY"]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


def answering_model(folder: Path, *, template: str | None) -> Path:
    """Write a model that says `ANSWER` after a line break: each token alone decides on the next, by its embedding."""
    size = 128
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    chain = [*TOKENIZER("\n" + ANSWER).input_ids, TOKENIZER.eos_token_id]
    with torch.no_grad():
        for weight in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(TOKENIZER), size))
        model.lm_head.weight.zero_()
        for token, following in pairwise(chain):
            model.lm_head.weight[following, token] = 1.0
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "rlpack", "serve", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A suite that a shell started in the background ignores Ctrl-C, and so would its children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def printed_until(process: "subprocess.Popen[str]", last: str) -> str:
    """Return what a command prints up to a line; the command has its own deadline."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(last):
            return "".join(lines)
    raise AssertionError(f"it ended: {''.join(lines)}")


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Served]:
    """Run the command, and what it tells a user to paste."""
    process = start(folder, "--max-length", "1024", "--start-timeout", str(START_S), *arguments)
    try:
        printed = printed_until(process, "Ctrl-C ends the server")
        lines = re.findall(r"^export .*$", printed, re.MULTILINE)
        show = 'printf "%s\\n" "$OPENAI_BASE_URL" "$OPENAI_API_KEY"'
        shell = subprocess.run("\n".join([*lines, show]), shell=True, capture_output=True, text=True, timeout=60.0)
        url, token = shell.stdout.splitlines()
        yield Served(process, printed, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": token})
    finally:
        process.terminate()
        process.wait(timeout=20.0)


def ends(process: "subprocess.Popen[str]", number: int) -> int:
    """Signal a command, check that it and all its processes end within 10 s, and return its exit code."""
    processes = family(process)
    assert processes
    begin = time.monotonic()
    process.send_signal(number)
    code = process.wait(timeout=20.0)
    while alive(processes) and time.monotonic() - begin < 10.0:
        time.sleep(0.1)
    assert alive(processes) == []
    return code


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = answering_model(tmp_path_factory.mktemp("served") / "a judge", template=TEMPLATE)
    with served(folder) as running:
        yield running


def complete(running: Served, path: str = "/completions", **request: Any) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json=request, headers=running.headers, timeout=60.0)


def test_a_completion_is_the_models(judge):
    answer = complete(judge, model="a judge", prompt="1 + 1 =\n", max_tokens=20, temperature=0.0).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (ANSWER, "stop")
    assert answer["usage"]["prompt_tokens"] == len("1 + 1 =\n")


def test_a_completion_takes_token_ids_and_a_seed(judge):
    ids = TOKENIZER("\nScor").input_ids
    answer = complete(judge, model="a judge", prompt=ids, max_tokens=4, temperature=0.0, seed=5).json()
    assert answer["choices"][0]["text"] == "e: 7"


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["no token", "a wrong one"])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/invocations", "/generative_scoring", "/tokenize", "/metrics"]
)
def test_without_the_token_no_path_answers(judge, path, headers):
    url = judge.url.removesuffix("/v1") + path
    request = {"model": "a judge", "prompt": "\n", "max_tokens": 1}
    assert httpx.post(url, json=request, headers=headers, timeout=60.0).status_code == 401
    assert httpx.get(url, headers=headers, timeout=60.0).status_code == 401


def test_the_token_is_in_a_private_file_and_on_no_command_line(judge):
    path = Path(re.findall(r"\$\(cat (\S+)\)", judge.printed)[0])
    assert path.read_text() == judge.token
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(judge.token) >= 43  # 256 bits
    command_lines = [
        " ".join(process.cmdline()) for process in [psutil.Process(judge.process.pid), *family(judge.process)]
    ]
    assert len(command_lines) >= 3  # the command, vLLM's front end and EngineCore
    assert all(judge.token not in line for line in command_lines)


def test_it_listens_on_loopback_alone(judge):
    sockets = [entry for process in family(judge.process) for entry in process.net_connections("inet")]
    addresses = {entry.laddr.ip for entry in sockets if entry.status == psutil.CONN_LISTEN}
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert addresses


def test_a_run_with_the_printed_overrides_is_scored_by_it(judge, monkeypatch):
    line = next(line for line in judge.printed.splitlines() if line.startswith("rlpack train "))
    config = compose([*shlex.split(line)[2:], "judge.weight=0.5"])
    monkeypatch.setenv("OPENAI_API_KEY", judge.token)
    role = JudgeWorker.from_settings(RankContext(), config, TOKENIZER)
    shard = BatchedDataDict({"prompt": ["1 + 1 =", "2 + 2 ="], "completion": ["2", "ÄÖ"]})
    scored = role.score(shard)
    assert scored["rewards"].tolist() == pytest.approx([0.35, 0.35])
    assert scored["reward_judge"].tolist() == pytest.approx([0.7, 0.7])
    assert scored["quarantined"].tolist() == [False, False]
    assert scored["reward_retries"].tolist() == [0, 0]


def test_sigterm_ends_it_with_all_its_processes_and_its_folder(judge):
    folder = Path(re.findall(r"\$\(cat (\S+)\)", judge.printed)[0]).parent
    assert ends(judge.process, signal.SIGTERM) == 0
    assert not folder.exists()


def test_without_a_chat_template_completions_work_and_chats_say_what_is_missing(tmp_path):
    with served(answering_model(tmp_path / "plain", template=None)) as running:
        assert "chats don't work, and so no judge" in running.printed
        assert "chat template" in running.printed
        assert "vllm.chat_template=" in running.printed
        assert "rlpack train" not in running.printed
        answer = complete(running, model="plain", prompt="\n", max_tokens=20, temperature=0.0)
        assert answer.json()["choices"][0]["text"] == ANSWER
        chat = complete(running, "/chat/completions", model="plain", messages=[{"role": "user", "content": "1"}])
        assert chat.status_code == 400
        assert "chat template" in chat.json()["error"]["message"]
        # Nothing survives a kill of the command, which can't end its processes itself.
        assert ends(running.process, signal.SIGKILL) == -signal.SIGKILL


def test_a_server_that_does_not_start_gives_vllms_reason_and_leaves_nothing(tmp_path):
    process = start(answering_model(tmp_path / "plain", template=None), "vllm.kv_cache_dtype=nonsense")
    printed, _ = process.communicate(timeout=START_S)
    assert process.returncode == 1
    last = printed.splitlines()[-1]
    assert last.startswith("rlpack serve: vLLM's server did not start: ")
    assert "nonsense" in last
    log = Path(re.findall(r"its output is in (\S+)", printed)[0])
    assert "nonsense" in log.read_text()
    assert os.listdir(log.parent) == [log.name]  # no token


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_during_the_start_ends_it(tmp_path, number):
    process = start(answering_model(tmp_path / "plain", template=None))
    printed = printed_until(process, "rlpack serve: starting vLLM")
    deadline = time.monotonic() + START_S
    while not family(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ends(process, number) == 130
    assert not Path(re.findall(r"its output is in (\S+)", printed)[0]).parent.exists()

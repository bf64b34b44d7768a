"""`rlpack serve` with vLLM itself: a model whose answer is known, a judge that asks it, and signals that end it."""

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.compose import compose
from rlpack.data.tokenization import character_tokenizer
from rlpack.rollout.vllm.vllm_package import installation_problem
from rlpack.worker import RankContext
from rlpack.workers.judge import JudgeWorker
from tests.end_to_end.commands import Command, done, records
from tests.vllm.servers import START_S, Served, ends, family, printed_until, served, start

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


@pytest.fixture(scope="module")
def judged(judge: Served, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Run the printed command, with few and short steps."""
    line = next(line for line in judge.printed.splitlines() if line.startswith("rlpack train "))
    words = ("experiment=smoke", "judge.weight=0.5", "trainer.steps=3", "checkpoint.every=3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", judge.token)
        return done(tmp_path_factory.mktemp("judged"), *shlex.split(line)[2:], *words, ranks=1)


def test_every_response_of_a_run_with_the_printed_command_is_scored_by_it(judged: Command):
    steps = [record for record in records(judged.run_dir) if record["phase"] == "train"]
    assert len(steps) == 3
    for step in steps:
        assert step["reward/functions/judge"] == pytest.approx(0.7)
        assert step["reward/roles/judge"] == pytest.approx(0.35)
        assert step["reward/mean"] == pytest.approx(step["reward/roles/reward"] + 0.35)
        assert step["reward/quarantined"] == step["reward/retries"] == 0


def test_sigterm_ends_it_with_all_its_processes_and_its_folder(judge):
    folder = Path(re.findall(r"\$\(cat (\S+)\)", judge.printed)[0]).parent
    assert ends(judge.process, signal.SIGTERM) == 0
    assert not folder.exists()


def test_a_runs_directory_serves_its_trained_model(judged: Command):
    model = AutoModelForCausalLM.from_pretrained(judged.run_dir / "model").eval()
    prompt = AutoTokenizer.from_pretrained(judged.run_dir / "model")("a1b2=").input_ids
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    with served(judged.run_dir, "--max-length", "64") as running:
        (listed,) = httpx.get(f"{running.url}/models", headers=running.headers, timeout=60.0).json()["data"]
        request = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        (choice,) = complete(running, model=listed["id"], **request).json()["choices"]
        assert choice["token_ids"] == expected[0, len(prompt) :].tolist()


def test_without_a_chat_template_completions_work_and_chats_say_what_is_missing(tmp_path):
    with served(answering_model(tmp_path / "plain", template=None)) as running:
        assert "chat requests, and therefore judges, don't work" in running.printed
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

"""`rlpack serve` with reward models: scores are those of transformers, and a run is rewarded by them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.compose import compose
from rlpack.data.arithmetic import ALPHABET
from rlpack.data.tokenization import character_tokenizer
from rlpack.rewards.errors import RewardError, TooManyFailuresError
from rlpack.worker import RankContext
from rlpack.workers.served_reward_model import ServedRewardModelWorker
from tests.vllm.servers import Served, ends, served, start

TOKENIZER = character_tokenizer(ALPHABET)
PAD = TOKENIZER.eos_token_id  # where the end of sequence also pads, a finished row is scored at the token before it
LONGEST = 1024  # of `served`
TOLERANCE = 1e-4
FAMILIES = os.environ.get("RLPACK_REWARD_MODELS", "qwen2,gemma3_text").split(",")


class Scorer(NamedTuple):
    """A reward model on both sides."""

    running: Served
    model: PreTrainedModel


def classifier(family: str, *, labels: int = 1, head_dim: int = 32) -> PreTrainedModel:
    """Return a small classifier with random weights, whose scores differ by more than 1.

    Attention is eager: the default of transformers leaves out the soft cap of Gemma 2.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(TOKENIZER),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=LONGEST,
        num_labels=labels,
        pad_token_id=PAD,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=TOKENIZER.bos_token_id,
    )
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def scorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    model = classifier(request.param)
    with served(saved(model, tmp_path_factory.mktemp("served") / "scorer")) as running:
        yield Scorer(running, model)


def overrides(running: Served) -> list[str]:
    """Return the overrides that the command prints."""
    return shlex.split(next(line for line in running.printed.splitlines() if line.startswith("rlpack train ")))[2:]


def role(running: Served, *more: str) -> ServedRewardModelWorker:
    """Build the role as a rank does."""
    config = compose([*overrides(running), *more])
    arguments = config.roles["judge"].arguments
    return ServedRewardModelWorker.from_settings(RankContext(), config, TOKENIZER, **arguments)


def rows_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([token for token in range(len(TOKENIZER)) if token != PAD])
    return [ids[torch.randint(len(ids), (length,), generator=generator)] for length in lengths]


def shard_of(rows: list[torch.Tensor]) -> BatchedDataDict:
    return BatchedDataDict({"input_ids": Ragged.from_rows(rows)})


@torch.no_grad()
def transformers_scores(model: PreTrainedModel, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the classifier's own scores, of rows in one padded batch."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model(input_ids=padded, attention_mask=mask).logits[:, 0]


def test_scores_are_those_of_transformers(scorer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", scorer.running.token)
    rows = rows_of(1, 2, 7, 33, 64, 200, 1000)
    end = torch.tensor([PAD])
    rows += [torch.cat([row, end]) for row in rows_of(5, 40)]
    expected = transformers_scores(scorer.model, rows)
    result = role(scorer.running, "judge.weight=0.5").score(shard_of(rows))
    assert expected.max() - expected.min() > 1.0  # neither bounded nor alike
    assert not ((expected > 0) & (expected < 1)).all()
    torch.testing.assert_close(result["reward_served_model"], expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(result["rewards"], 0.5 * expected, atol=TOLERANCE, rtol=0)
    assert not result["quarantined"].any()
    assert result["reward_retries"].tolist() == [0] * len(rows)


def test_a_client_that_asks_for_nothing_else_gets_no_activation(scorer):
    (row,) = rows_of(12)
    url = f"{scorer.running.url.removesuffix('/v1')}/classify"
    request = {"model": "scorer", "input": row.tolist()}
    answer = httpx.post(url, json=request, headers=scorer.running.headers, timeout=60.0).json()
    expected = transformers_scores(scorer.model, [row]).tolist()
    assert answer["data"][0]["probs"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["no token", "a wrong one"])
@pytest.mark.parametrize("path", ["/classify", "/pooling", "/score", "/v1/score", "/rerank", "/tokenize"])
def test_without_the_token_no_path_answers(scorer, path, headers):
    url = scorer.running.url.removesuffix("/v1") + path
    request = {"model": "scorer", "input": [1, 2]}
    assert httpx.post(url, json=request, headers=headers, timeout=60.0).status_code == 401


def test_a_wrong_token_and_a_row_that_is_too_long_are_errors(scorer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", scorer.running.token)
    with pytest.raises(RewardError, match=rf"answered 400 .*{LONGEST}"):
        role(scorer.running).score(shard_of(rows_of(LONGEST + 1)))
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(RewardError, match="answered 401"):
        role(scorer.running).score(shard_of(rows_of(3)))


def train(scorer: Scorer, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [*overrides(scorer.running), "experiment=smoke", f"run_dir={run}", "trainer.steps=2", "model=tiny", *more]
    return subprocess.run(
        [sys.executable, "-m", "rlpack", "train", *words],
        env={**os.environ, **scorer.running.environment},
        capture_output=True,
        text=True,
        timeout=300.0,
    )


def test_a_grpo_run_is_rewarded_by_it(scorer, tmp_path):
    ended = train(scorer, tmp_path / "run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps: list[dict[str, Any]] = [record for record in records if "reward/functions/served_model" in record]
    assert len(steps) == 2
    for step in steps:
        assert step["reward/functions/served_model"] == step["reward/roles/judge"] != 0.0
        assert step["reward/quarantined"] == step["reward/retries"] == 0.0


def test_a_server_that_is_gone_ends_the_run_after_counted_retries(scorer, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", scorer.running.token)
    assert ends(scorer.running.process, signal.SIGTERM) == 0
    faults = ("judge.retries=1", "judge.backoff_s=0.01")
    few = role(scorer.running, *faults, "judge.max_failures=1").score(shard_of(rows_of(3, 4)))
    assert few["quarantined"].tolist() == [True, True]
    assert few["reward_retries"].tolist() == [2, 0]
    with pytest.raises(TooManyFailuresError, match=r"judge\.max_failures"):
        role(scorer.running, *faults).score(shard_of(rows_of(*[3] * 120)))


def refused(folder: Path) -> str:
    """Return what the command prints about a model that it doesn't serve, after checking that nothing started."""
    process = start(folder)
    printed, _ = process.communicate(timeout=100.0)
    assert process.returncode == 2
    assert "starting vLLM" not in printed
    return re.sub(r"\s+", " ", printed)


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    words = "is a sequence classifier with 2 labels, but a reward model has 1"
    assert words in refused(saved(classifier("qwen2", labels=2), tmp_path / "two"))


def test_a_reward_model_that_vllm_lacks_is_refused_with_the_way_out(tmp_path):
    printed = refused(saved(classifier("diffllama"), tmp_path / "other"))
    assert "is a diffllama reward model, but the installed vLLM has no DiffLlamaForCausalLM" in printed
    assert "reward_model.path=" in printed

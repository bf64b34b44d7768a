"""The examples in one process: their sizes, their results, and their own tests. tests/end_to_end runs them."""

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.algorithms.policy_loss import PolicyTokens
from rlpack.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Return a function that imports a module of an example, which is forgotten after the test."""
    before = set(sys.modules)

    def load_module(example: str, module: str) -> Any:
        monkeypatch.syspath_prepend(EXAMPLES / example)
        return importlib.import_module(module)

    yield load_module
    for name in set(sys.modules) - before:
        if str(sys.modules[name].__dict__.get("__file__")).startswith(str(EXAMPLES)):
            del sys.modules[name]


def test_the_judges_package_has_at_most_40_lines_and_imports_nothing_private():
    lines = [line for path in (EXAMPLES / "judge_role" / "judge_role").glob("*.py") for line in path.open()]
    assert len(lines) <= 40
    assert not any("import _" in line or "._" in line.partition("import")[0] for line in lines if "import" in line)


def test_the_judges_package_declares_its_dependencies():
    project = tomllib.loads((EXAMPLES / "judge_role" / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["rlpack-train", "torch"]
    assert project["tool"]["setuptools"]["packages"] == ["judge_role"]


def test_the_judges_own_tests_pass(load: Callable[[str, str], Any]):
    tests = load("judge_role", "test_judge")
    found = [value for name, value in vars(tests).items() if name.startswith("test_")]
    assert len(found) == 2
    for test in found:
        test()


def test_the_graded_reward_tells_right_from_wrong_from_unreadable(load: Callable[[str, str], Any]):
    score = load("custom_reward", "graded_reward").score
    texts = ["a11b24#4", "a11b24#5 ", "a11b24#", "#4 and more", ""]
    assert score([""] * 5, texts, ["4"] * 5, form=0.25) == [1.0, 0.25, 0.0, 0.0, 0.0]
    assert score(["", ""], ["#4", "#4"], [None, 4]) == [None, 1.0]


def test_the_tapered_loss_is_the_papers_token_by_token(load: Callable[[str, str], Any]):
    tapered = load("custom_loss", "tapered_loss").tapered
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    new = torch.tensor([-0.5, -2.0, -0.5, -2.0], requires_grad=True)
    advantages = torch.tensor([2.0, 2.0, -3.0, -3.0])
    tokens = PolicyTokens(new, old, advantages, torch.ones(4, dtype=torch.bool), torch.tensor([4]))
    loss = tapered(tokens)
    loss.token_losses.sum().backward()
    shrunk = torch.tensor(-1.0).exp().item()  # the ratio of the last token; the third one's, e^0.5, is cut to 1
    torch.testing.assert_close(new.grad, torch.tensor([-2.0, -2.0, 3.0, 3.0 * shrunk]))
    assert loss.clipped_high.tolist() == [False, False, True, False]


def test_the_original_advantage_shrinks_for_repetition(load: Callable[[str, str], Any]):
    original = load("custom_advantage", "original_advantage").original
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    repeated = torch.tensor([0.5, 0.5, 0.0, 0.9])
    plain, found = (
        original(rewards, groups, torch.ones(4, dtype=torch.bool), repeated, power=power) for power in (0.0, 2.0)
    )
    torch.testing.assert_close(found, plain * torch.tensor([0.25, 1.0, 1.0, 1.0]))
    assert plain[0] > 0 > plain[1]


def test_an_advantage_without_the_role_that_makes_its_column_is_refused_before_anything_starts(
    load: Callable[[str, str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    load("custom_advantage", "original_advantage")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds its working directory
    assert main(["train", "run_dir=new", "algorithm.advantage=original_advantage:original"]) == 2
    said = capsys.readouterr().err
    assert "algorithm.advantage=original_advantage:original requires 'repeated'; a batch has rewards, group_ids" in said
    assert not (tmp_path / "new").exists()

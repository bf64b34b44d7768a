"""What the documents tell a reader to type works: commands compose, code runs, links lead somewhere."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rlpack.cli.main import main
from rlpack.config.compose import compose
from rlpack.observe.plan_record import PlanRecord
from rlpack.packing import Batching

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/guide.md", "benchmarks/RESULTS.md")]


def blocks(language: str) -> list[tuple[str, str]]:
    """Return document name and text of every fenced block of a language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(path.name, text) for path in DOCUMENTS for text in pattern.findall(path.read_text())]


def commands() -> list[list[str]]:
    """Return every command of the documents as words, comments and continuations resolved."""
    lines = [line for _, text in blocks("sh") for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


TRAIN = [words[2:] for words in commands() if words[:2] == ["rlpack", "train"]]
PLAN = [words[1:] for words in commands() if words[:2] in (["rlpack", "plan"], ["rlpack", "simulate"])]
MAKE = sorted({words[1] for words in commands() if words[0] == "make"})


@pytest.mark.parametrize("arguments", TRAIN, ids=" ".join)
def test_every_train_command_composes_to_a_valid_config(arguments, tmp_path, monkeypatch, capsys):
    flags = [word for word in arguments if word.startswith("-")]
    overrides = [word for word in arguments if word not in flags and word != "job"]
    monkeypatch.chdir(tmp_path)
    for name in ("my_rewards", "my_package/judge"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    if "--multirun" in flags:
        overrides = [word.split(",")[0] for word in overrides]
    if "--cfg" in flags:
        assert main(["train", *overrides, "--cfg", "job"]) == 0
        assert "trainer:" in capsys.readouterr().out
    assert compose(overrides).recipe in ("grpo", "sft")


@pytest.mark.parametrize("arguments", PLAN, ids=" ".join)
def test_every_planning_command_runs(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.jsonl").write_text("".join(f"{length}\n" for length in range(1, 2000)))
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    PlanRecord(1, tuple(range(1, 400)), Batching(max_tokens=8192), 2).write(run_dir / "packing.json")
    assert main(arguments) == 0
    assert "lock step" in (shown := capsys.readouterr().out) or "idle %" in shown


@pytest.mark.parametrize("target", MAKE)
def test_every_make_target_exists(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_python_blocks_compile_and_the_readmes_run():
    for name, text in blocks("python"):
        tree = ast.parse(text)
        if name == "README.md":
            exec(compile(tree, name, "exec"), {})


def test_links_lead_to_files():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_readme_keeps_its_limits():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("make ")) < 25


def test_continuous_integration_runs_the_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in script if line.startswith("make")] == ["make test"]
    assert ["make", "test"] in [words[:2] for words in commands()]

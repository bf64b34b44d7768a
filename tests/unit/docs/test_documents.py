"""The documents are correct: commands compose, code runs, links resolve."""

import ast
import importlib
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlpack.cli.evaluate import _without_effect, parser
from rlpack.cli.main import main
from rlpack.cli.serve_request import parser as serve_parser
from rlpack.cli.serve_request import vllm_arguments
from rlpack.config.compose import compose, compose_evaluation
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.sinks import JsonlSink
from rlpack.packing import Batching
from rlpack.testing import check_role, contracts

ROOT = Path(__file__).parents[3]
NAMES = ("README.md", "CONTRIBUTING.md", "docs/guide.md", "docs/roles.md", "docs/recipes.md", "benchmarks/RESULTS.md")
DOCUMENTS = [*(ROOT / name for name in NAMES), *sorted((ROOT / "examples").glob("*/README.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """Return document name and text of every fenced block of a language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(str(path.relative_to(ROOT)), text) for path in DOCUMENTS for text in pattern.findall(path.read_text())]


def commands() -> list[list[str]]:
    """Return every command of the documents as words, without comments and line continuations.

    tests/end_to_end/test_recipe_page.py runs those of docs/recipes.md.
    """
    lines = [
        line
        for name, text in blocks("sh")
        if name != "docs/recipes.md"
        for line in text.replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


TRAIN = [words[2:] for words in commands() if words[:2] == ["rlpack", "train"]]
PLAN = [words[1:] for words in commands() if words[:2] in (["rlpack", "plan"], ["rlpack", "simulate"])]
SUBMIT = [words for words in commands() if words[:2] == ["rlpack", "submit"]]
ASK = [words[1:] for words in commands() if words[:1] == ["rlpack"] and words[1] in {"jobs", "logs", "stop"}]
EVALUATE = [words[2:] for words in commands() if words[:2] == ["rlpack", "evaluate"]]
SERVE = [words[2:] for words in commands() if words[:2] == ["rlpack", "serve"]]
IMAGES = [words for words in commands() if words[:2] == ["docker", "build"]]
KUBERAY = [words[1:] for words in commands() if words[1:2] == ["deploy/kuberay.py"]]
SLURM = [words for words in commands() if words[:1] == ["sbatch"]]
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
    assert compose(overrides).recipe.name in ("grpo", "ppo", "sft")


@pytest.mark.parametrize("arguments", EVALUATE, ids=" ".join)
def test_every_evaluate_command_has_overrides_that_compose(arguments):
    parsed, overrides = parser().parse_known_args(arguments)
    assert parsed.model in ("runs/mine", "path/to/model")
    assert list(_without_effect(overrides, parsed.model)) == []
    compose_evaluation(overrides, {"model": compose().model_dump(mode="json")["model"]})


@pytest.mark.parametrize("arguments", SERVE, ids=" ".join)
def test_every_serve_command_parses(arguments):
    parsed, words = serve_parser().parse_known_args(arguments)
    assert parsed.model in ("runs/mine", "Qwen/Qwen3-0.6B", "path/to/reward_model")
    assert len(vllm_arguments(words)) == len(words)


@pytest.mark.parametrize("arguments", PLAN, ids=" ".join)
def test_every_planning_command_runs(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.jsonl").write_text("".join(f"{length}\n" for length in range(1, 2000)))
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    PlanRecord(1, tuple(range(1, 400)), Batching(max_tokens=8192), 2).write(run_dir / "packing.json")
    figures = {
        "rollout/response_tokens_mean": 100.0,
        "rollout/response_tokens_max": 300.0,
        "packing/real_tokens": 80000.0,
        "time/generate_s": 9.0,
        "time/step_s": 20.0,
        "time/sync_s": 1.0,
        "time_s": 1.0,
        "phase": "train",
    }
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(figures | {"step": n}) + "\n" for n in range(1, 5)))
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert any(column in shown for column in ("lock step", "idle %", "time s"))


@pytest.mark.parametrize("words", SUBMIT, ids=" ".join)
def test_every_job_would_be_submitted_if_its_server_answered(words, tmp_path):
    arguments = ["submit", "--address", "http://127.0.0.1:1", *words[words.index("--address") + 2 :]]
    assert_no_server_answers(arguments, tmp_path)


@pytest.mark.parametrize("words", ASK, ids=" ".join)
def test_every_question_about_a_job_is_put_to_its_server(words, tmp_path):
    assert_no_server_answers(["127.0.0.1:1" if word.startswith("http") else word for word in words], tmp_path)


def assert_no_server_answers(arguments, folder):
    """Run a command in a process of its own: this one may hold the token of a Ray that a test has started."""
    command = [sys.executable, "-P", "-m", "rlpack", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "no Ray job server answers at http://127.0.0.1:1" in done.stderr


def test_images_manifests_and_scripts_are_made_from_files_that_are_there_by_runs_that_can_be():
    assert IMAGES
    assert all((ROOT / words[words.index("-f") + 1]).is_file() for words in IMAGES)
    (kuberay,), (slurm,) = KUBERAY, SLURM
    done = subprocess.run(
        [sys.executable, *kuberay[: kuberay.index(">")]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    script = slurm.index("deploy/slurm.sh")
    assert (ROOT / slurm[script]).is_file()
    assert compose(slurm[script + 1 :]).run_dir == "/shared/mine"


@pytest.mark.parametrize("target", MAKE)
def test_every_make_target_exists(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_python_blocks_compile_and_the_readmes_run():
    for name, text in blocks("python"):
        tree = ast.parse(text)
        if name == "README.md":
            exec(compile(tree, name, "exec"), {})


def test_the_guide_reads_metrics_as_they_were_logged(tmp_path, monkeypatch, capsys):
    (snippet,) = (text for name, text in blocks("python") if name == "docs/guide.md" and "read_json" in text)
    monkeypatch.chdir(tmp_path)
    Path("runs/mine").mkdir(parents=True)
    sink = JsonlSink(Path("runs/mine/metrics.jsonl"))
    for step, reward in ((1, 0.25), (2, math.nan), (3, 0.75)):
        sink.log(step, "train", {"reward/mean": reward, "time/step_s": 2.0 * step, "actor/kl": math.inf})
    sink.log(3, "evaluation", {"evaluation/reward_greedy": 0.5})
    sink.close()
    names = {}
    exec(compile(ast.parse(snippet), "docs/guide.md", "exec"), names)
    steps = names["steps"]
    assert list(steps.index) == [1, 2, 3]
    assert set(steps.columns) == {"phase", "time_s", "reward/mean", "time/step_s", "actor/kl"}
    np.testing.assert_array_equal(steps["reward/mean"].to_numpy(), [0.25, math.nan, 0.75])
    assert (steps["actor/kl"] == math.inf).all()
    assert "4.0" in capsys.readouterr().out  # the mean of time/step_s


def test_the_roles_of_the_roles_page_keep_their_contracts_and_its_tests_pass(tmp_path, monkeypatch):
    for text in (text for name, text in blocks("python") if name == "docs/roles.md"):
        path = tmp_path / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        tests = importlib.import_module("brevity.test_judge")
        for name in [name for name in vars(tests) if name.startswith("test_")]:
            vars(tests)[name]()
        check_role(importlib.import_module("brevity.lexical").LexicalWorker, arguments={"seed": 3})
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "brevity"]:
            del sys.modules[name]


def test_the_contracts_of_the_roles_page_are_those_that_are_checked():
    page = (ROOT / "docs" / "roles.md").read_text()
    numbered = re.findall(r"^\d+\. (\w+): ", contracts.__doc__ or "", re.MULTILINE)
    table = page.partition("| contract |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in row.split("|")[1].strip().split(", ")]
    assert named == numbered


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


def test_the_design_lists_every_package_and_module_of_rlpack():
    listed = set(
        re.findall(r"^\| `rlpack/([a-z_]+)(?:/|\.py)`", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    )
    entries = [path for path in (ROOT / "rlpack").iterdir() if not path.name.startswith("_") and not path.is_symlink()]
    assert listed == {path.stem for path in entries if path.is_dir() or path.suffix == ".py"}

"""docs/recipes.md, followed by a reader: its files in an empty folder, then its commands, one after the other.

`make test` runs the command that takes thirty steps with two, `make test-long` as it is.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, curve, steps

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
DEADLINE_S = 240.0
STEPS, FEWER = 30, 2


def blocks(language: str) -> list[str]:
    """Return the page's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Return the page's commands in their order."""
    lines = [line for text in blocks("sh") for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.strip()]


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell in `folder` does, in the tests' environment."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def shortened(command: str) -> str:
    """Return a command with fewer steps, if it has the page's number of them."""
    if f"trainer.steps={STEPS}" not in command:
        return command
    return f"{command} sft_warmup.steps={FEWER} trainer.steps={FEWER}"


@pytest.fixture(scope="module")
def num_steps(request: pytest.FixtureRequest) -> int:
    """Return how many steps the page's longest command takes."""
    return STEPS if request.config.getoption("--long") else FEWER


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory, num_steps: int) -> tuple[Path, dict[str, str]]:
    """Return the folder in which a reader has done all that the page says, and each command's output."""
    folder = tmp_path_factory.mktemp("reader")
    for text in blocks("python"):
        path = folder / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    outputs = {}
    for command in commands():
        done = run(folder, command if num_steps == STEPS else shortened(command))
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        assert "Warning" not in done.stderr
        outputs[command] = done.stdout
    return folder, outputs


def test_every_command_of_the_page_works_and_the_tests_of_its_role_pass(followed, num_steps):
    folder, outputs = followed
    assert [command.split()[0] for command in outputs].count("rlpack") == 4
    (tested,) = [output for command, output in outputs.items() if "pytest" in command]
    assert "2 passed" in tested
    (shown,) = [output for command, output in outputs.items() if command.startswith("grep")]
    assert shown.count("recipe/revised_fraction") == num_steps
    run_dir = folder / "runs" / "critique"
    assert steps(run_dir, "train") == list(range(1, num_steps + 1))
    assert min(curve(run_dir, "time/recipe/revise_s")) > 0
    assert (run_dir / "model" / "model.safetensors").exists()


@pytest.mark.long
def test_the_policy_learns_to_do_without_the_critique(followed):
    folder, _ = followed
    run_dir = folder / "runs" / "critique"
    revised, rewards = curve(run_dir, "recipe/revised_fraction"), curve(run_dir, "reward/mean")
    assert sum(revised[-5:]) < sum(revised[:5]) / 2, revised
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


def test_the_error_on_the_page_is_the_one_that_a_reader_gets(followed):
    folder, _ = followed
    (message,) = [text.strip() for text in blocks("text") if text.startswith("rlpack train: ")]
    done = run(folder, "rlpack train recipe.target=self_critique.recipe revision.penalty=-1")
    told = [line for line in done.stderr.splitlines() if not line.startswith("importing ")]  # a slow import
    assert (done.returncode, told) == (2, [message])


def test_the_files_of_the_page_are_those_of_its_plan():
    (plan,) = [text for text in blocks("text") if text.startswith("self_critique/")]
    named = [line.split()[0] for line in plan.splitlines()[1:]]
    written = [text.partition("\n")[0].removeprefix("# self_critique/") for text in blocks("python")]
    assert sorted(named) == sorted(written)
    assert all(shlex.split(command) for command in commands())

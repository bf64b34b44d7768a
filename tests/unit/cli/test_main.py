import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import rlpack
from rlpack.cli.main import main

ROOT = Path(rlpack.__file__).parents[1]


def rlpack_process(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "rlpack", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        # A suite that a shell started in the background ignores Ctrl-C, and so would its children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def test_help_answers_in_a_third_of_a_second():
    fastest = 1e9
    for _ in range(5):  # the fastest of five, so that a busy machine doesn't decide
        begin = time.perf_counter()
        answer = rlpack_process("--help")
        fastest = min(fastest, time.perf_counter() - begin)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "rlpack train recipe=sft" in answer.stdout
    assert fastest < 0.3


def test_help_imports_nothing_heavy():
    code = "import sys; from rlpack.cli.main import main; main([]); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    for package in ("torch", "ray", "transformers", "hydra", "omegaconf", "pydantic", "numpy"):
        assert f"'{package}'" not in done.stdout


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"rlpack {rlpack.__version__}\n"


def test_the_version_in_the_project_file_is_the_packages():
    assert f'version = "{rlpack.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_an_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as left:
        main(["trian"])
    assert left.value.code == 2
    assert "'trian' is not a command; did you mean train? Commands: evaluate, jobs, logs, " in capsys.readouterr().err


def test_a_wrong_key_ends_with_code_2_before_torch_or_ray_is_imported():
    answer = rlpack_process("train", "trainer.stepz=1", PYTHONPROFILEIMPORTTIME="1")
    said = [line for line in answer.stderr.splitlines() if not line.startswith("import time:")]
    assert (answer.returncode, answer.stdout) == (2, "")
    assert len(said) == 1
    assert said[0].startswith("rlpack train: trainer.stepz is not a key; did you mean trainer.steps?")
    imported = {
        line.rpartition("|")[2].strip() for line in answer.stderr.splitlines() if line.startswith("import time:")
    }
    assert "rlpack.cli.train" in imported  # the listing works
    assert imported.isdisjoint({"torch", "ray", "transformers", "numba"})


def test_report_refuses_a_directory_that_holds_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"rlpack report: {tmp_path} contains no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rlpack ", "evaluate jobs logs plan report serve simulate stop submit trace train"),
        ("rlpack tra", "trace train"),
        ("rlpack train recipe=g", "recipe=gmpo recipe=grpo recipe=gspo"),
        ("rlpack train model=tiny trainer.st", "trainer.steps="),
        ("rlpack train placement.po", "placement.pools."),
        ("rlpack train batching.mode=", "batching.mode=packed batching.mode=dynamic batching.mode=fixed"),
        ("rlpack train ++batching.mode=f", "++batching.mode=fixed"),
        ("rlpack train critic.optimizer.name=adamw_", "critic.optimizer.name=adamw_8bit"),
        ("rlpack train recipe=dapo dapo.overlong_filter=", "dapo.overlong_filter=true dapo.overlong_filter=false"),
        ("rlpack train seed=", "seed=1"),
        ("rlpack train --dry-run recipe=g", "recipe=gmpo recipe=grpo recipe=gspo"),
        ("rlpack train --memory-gb 80 --dry-run model=tiny trainer.st", "trainer.steps="),
        ("rlpack train --memory-gb=80 --dry-run batching.mode=f", "batching.mode=fixed"),
        ("rlpack report ", ""),
    ],
)
def test_the_shell_is_offered_commands_groups_and_keys(line, offered, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.strip() == offered


def test_fish_is_offered_a_choice_a_line(monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", "rlpack train batching.mode=")
    assert main(["-sc", "query=fish"]) == 0
    assert capsys.readouterr().out.split() == ["batching.mode=packed", "batching.mode=dynamic", "batching.mode=fixed"]


@pytest.mark.parametrize("arguments", [["-sc", "install=bash"], ["train", "-sc", "install=bash"]])
def test_completion_is_installed_for_the_command(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out.rstrip().endswith("hydra_bash_completion rlpack")


def test_output_that_nobody_reads_ends_a_command_quietly():
    with subprocess.Popen(
        [sys.executable, "-m", "rlpack", "train", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (141, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_that_is_stopped_before_its_run_began_ends_with_130_and_one_line(tmp_path, number):
    # The command stops itself at the first module that it imports after the signals are taken care of.
    (tmp_path / "hydra.py").write_text(f"import os\nfor _ in range(2):\n    os.kill(os.getpid(), {int(number)})\n")
    ended = rlpack_process("train", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (ended.returncode, ended.stderr) == (130, "rlpack train: interrupted; nothing was saved yet\n")

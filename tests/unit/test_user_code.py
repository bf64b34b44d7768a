"""Whatever user code raises, wherever it is imported or called, ends as one error that names it."""

import ast
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.policy_loss import PolicyTokens
from rlpack.algorithms.registry import find_loss, row_advantages
from rlpack.cli.environment import check_code
from rlpack.cli.main import main
from rlpack.cli.signals import termination_as_keyboard_interrupt
from rlpack.config.errors import ConfigError
from rlpack.config.recipes import config_class, load_main, recipe_texts
from rlpack.config.schema import Algorithm, Recipe
from rlpack.config.validate import validate
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import PlacementError, RankError
from rlpack.distributed.process import RankProcess, load_class
from rlpack.rewards.errors import RewardError
from rlpack.rewards.signatures import read_signature, resolve
from rlpack.user_code import Interrupted, UserCode, UserCodeError
from rlpack.workers.loss import PolicyGradientLoss
from tests.builders import tiny_config

RAISED = {
    "SystemExit": "raise SystemExit(0)",
    "SystemExit by sys": "import sys; sys.exit()",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "CancelledError": "import asyncio; raise asyncio.CancelledError",
    "Worse": "Worse = type('Worse', (BaseException,), {'__str__': lambda self: exit(0)}); raise Worse",
    "BaseExceptionGroup": "raise BaseExceptionGroup('both', [SystemExit(0), KeyboardInterrupt()])",
    "ValueError": "raise ValueError('plain')",
}
# Where user code runs: its module, with the place at which it raises, and how rlpack runs it.
RECIPE = """
    from pydantic import model_validator
    from rlpack.config.recipes import RecipeSpec
    from rlpack.config.sections.section import Section

    class Mine(Section):
        rate: float = 0.5

        @model_validator(mode="after")
        def check(self):
            {section}
            return self

    def rule(config):
        {rule}
        yield ""

    SPEC = RecipeSpec(sections={{"mine": Mine}}, rules=(rule,))
    def main(config):
        {main}
"""
ROLE = """
    from rlpack.worker import Worker

    class Role(Worker):
        @classmethod
        def from_settings(cls, context):
            {build}
            return cls(context)

        def score(self):
            {method}
"""


def advantage(name: str) -> object:
    columns = {"rewards": torch.zeros(2), "valid": torch.ones(2, dtype=torch.bool)}
    return row_advantages(f"{name}:f", {}, {}, columns)


def loss(name: str) -> object:
    column, mask = torch.zeros(1), torch.ones(1, dtype=torch.bool)
    settings = Algorithm(loss=f"{name}:f")
    tokens = PolicyTokens(column, column, column, mask, torch.ones(1, dtype=torch.int64))
    return PolicyGradientLoss(settings, temperature=1.0).evaluate(tokens)


def role(name: str) -> RankProcess:
    process = RankProcess(RankContext(), threads=torch.get_num_threads())
    process.start_role("judge", f"{name}:Role", ())
    return process


def rule(name: str) -> None:
    config = config_class(name)(recipe=Recipe(target=name))
    raise ConfigError(list(recipe_texts(config, "rules")))


FUNCTION = "def f(*args, **kwargs):\n    {}"
SIGNATURE = "class F:\n    @property\n    def __signature__(self):\n        {}\n    def __call__(self): pass\nf = F()"
SITES: dict[str, tuple[str, Callable[[str], object], type[Exception], str]] = {
    "reward, imported": ("{}", lambda name: resolve(f"{name}:f"), RewardError, "reward.function is '{}:f'"),
    "reward, looked up": (
        "def __getattr__(name):\n    {}", lambda name: resolve(f"{name}:f"), RewardError, "reward.function is '{}:f'"
    ),
    "reward, inspected": (
        SIGNATURE, lambda name: read_signature(resolve(f"{name}:f")), RewardError, "reward.function"
    ),
    "role, imported": ("{}", lambda name: load_class(f"{name}:Role"), PlacementError, "role target '{}:Role'"),
    "role, built": (ROLE.replace("{method}", "pass").replace("{build}", "{}"), role, RankError, ""),
    "role, called": (
        ROLE.replace("{build}", "pass").replace("{method}", "{}"),
        lambda name: role(name).call("judge", "score", {}), RankError, "",
    ),
    "loss, imported": ("{}", lambda name: find_loss(f"{name}:f", {}, {}), AlgorithmError, "algorithm.loss is '{}:f'"),
    "loss, called": (FUNCTION, loss, AlgorithmError, "algorithm.loss '{}:f'"),
    "advantage, imported": ("{}", advantage, AlgorithmError, "algorithm.advantage is '{}:f'"),
    "advantage, called": (FUNCTION, advantage, AlgorithmError, "algorithm.advantage '{}:f'"),
    "recipe, imported": ("{}", config_class, ConfigError, "recipe.target is '{}'"),
    "recipe, loaded": ("{}", load_main, ConfigError, "recipe.target is '{}'"),
    "recipe, its rules": (
        RECIPE.format(section="pass", main="pass", rule="{}"), rule, ConfigError, "recipe.target is '{}', whose"
    ),
    "recipe, its section": (
        RECIPE.format(section="{}", main="pass", rule="pass"),
        lambda name: validate({"recipe": {"target": name}}), ConfigError, "recipe.target is '{}'",
    ),
    "package above a module": (
        "{}", lambda name: check_code(with_loss(f"{name}.inner:f"), os.environ), ConfigError,
        "'{}.inner:f'",
    ),
}  # fmt: skip
# Ordinary exceptions of these pass as they are: their traceback says more.
PASSING = {"loss, called", "advantage, called", "role, built", "role, called", "recipe, loaded", "recipe, its section",
           "reward, looked up"}  # fmt: skip


def with_loss(target: str):
    return tiny_config(algorithm=Algorithm(loss=target))


@pytest.fixture
def as_command() -> Iterator[None]:
    """Handle signals as the command does, which makes a KeyboardInterrupt of user code known as such."""
    with termination_as_keyboard_interrupt():
        yield


def write_module(folder: Path, text: str, raises: str) -> str:
    """Write a module of a name of its own; `{}` in its text is where it raises."""
    name = f"user_code_{abs(hash((text, raises)))}"
    (folder / name).mkdir()
    text = textwrap.dedent(text)
    indent = next((re.match(" *", line)[0] for line in text.splitlines() if "{}" in line), "")
    (folder / name / "__init__.py").write_text(text.replace("{}", raises.replace("; ", f"\n{indent}")))
    return name


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.usefixtures("as_command")
def test_what_user_code_raises_is_an_error_that_names_it(site, raised, tmp_path, monkeypatch):
    text, run, error, message = SITES[site]
    name = write_module(tmp_path, text, RAISED[raised])
    monkeypatch.syspath_prepend(tmp_path)
    expected = ValueError if raised == "ValueError" and site in PASSING else error
    with pytest.raises(expected) as caught:
        run(name)
    kind = raised.partition(" ")[0]
    if expected is error:
        assert message.format(name) in str(caught.value)
        assert kind in str(caught.value)


@pytest.fixture
def interruptible():
    """SIGINT as in a terminal: processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_real_interrupt_passes():
    with pytest.raises(Interrupted), termination_as_keyboard_interrupt(), UserCode("it"):
        signal.raise_signal(
            signal.SIGINT
        )  # os.kill may reach another thread first, and the block ends before its handler
    with pytest.raises(KeyboardInterrupt), UserCode("it"):  # without the command, as in a notebook
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("as_command")
def test_an_interrupt_that_a_wait_of_ray_replaces_passes():
    def wait() -> None:
        try:
            raise Interrupted
        except Interrupted:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt), UserCode("it"):
        wait()
    with pytest.raises(UserCodeError, match="it raised KeyboardInterrupt"), UserCode("it"):
        raise KeyboardInterrupt  # of user code, after an earlier interrupt


def test_a_keyboard_interrupt_of_a_thread_is_of_user_code():
    caught: list[Exception] = []

    def run() -> None:
        try:
            with UserCode("it"):
                raise KeyboardInterrupt
        except UserCodeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10.0)
    assert [str(error) for error in caught] == ["it raised KeyboardInterrupt"]


@pytest.mark.parametrize("raised", [name for name in RAISED if name != "ValueError"])
def test_a_recipe_that_leaves_its_main_fails_the_command(raised, tmp_path, monkeypatch, capsys):
    name = write_module(tmp_path, RECIPE.format(section="pass", rule="return", main="{}"), RAISED[raised])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    # An address keeps the command from starting Ray itself; the recipe never connects to it.
    assert main(["train", f"recipe.target={name}", "placement.address=127.0.0.1:1", "run_dir=run"]) == 1
    heard = capsys.readouterr().err
    assert heard.count("rlpack train: ") == 1
    assert f"recipe.target {name!r} raised {raised.partition(' ')[0]}" in heard
    assert "Traceback" not in heard


def test_user_modules_are_imported_in_one_place():
    """Every other import by name is of a literal, or of a module of ours."""
    root = Path(__file__).parents[2]
    ours = {"rlpack/user_code.py", "rlpack/data/datasets.py", "rlpack/rollout/engine.py", "rlpack/observe/sinks.py"}
    ours |= {"rlpack/installation.py"}  # names of optional packages
    # Modules of Ray and of vLLM; the file of a top-level package, which is not imported.
    ours |= {"rlpack/distributed/ray_internals.py", "rlpack/startup/role_sources.py"}
    ours |= {"rlpack/rollout/vllm/server_main.py"}
    found = []
    for folder in ("rlpack", "workers", "recipes"):
        for file in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {
                    "import_module", "find_spec", "__import__", "run_path", "run_module",
                }:  # fmt: skip
                    found += [] if isinstance(node.args[0], ast.Constant) else [str(file.relative_to(root))]
    assert set(found) <= ours


# What a module does to the command's process, and what the command prints; it ends with code 2 each time.
ATTACKS = {
    "os._exit": ("import os\nos._exit(0)", "ProcessExit: os._exit(0)"),
    "posix._exit": ("import posix\nposix._exit(0)", "ProcessExit: os._exit(0)"),
    "os.abort": ("import os\nos.abort()", "ProcessExit: os.abort()"),
    "os._exit at exit": ("import atexit, os\natexit.register(os._exit, 0)\nraise ValueError('x')", "ValueError: x"),
    "os._exit in a thread": (
        "import os, threading\nt = threading.Timer(0, os._exit, [0])\nt.start()\nt.join()\nraise OSError('x')",
        "OSError: x",
    ),
    "closed descriptors": ("import os\nos.close(1)\nos.close(2)\nraise ValueError('x')", "ValueError: x"),
    "closed streams": ("import sys\nsys.stdout.close()\nsys.stderr.close()\nraise ValueError('x')", "ValueError: x"),
    "a hang": ("import time\ntime.sleep(1000)", "ImportTimeout: not done within 0.2 s; do the work in its functions"),
    "a busy loop": ("while True: pass", "ImportTimeout: not done within 0.2 s; do the work in its functions"),
    "another directory": (
        "import os\nos.chdir('/')\nraise ValueError('x')",
        "ValueError: x",
    ),
    "a fork that ends": (
        "import os\npid = os.fork()\nif pid == 0: os._exit(5)\n"
        "raise ValueError(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
        "ValueError: 5",
    ),
}
COMMAND = """
import os, sys
from rlpack import user_code
user_code.protect_command()
user_code._IMPORT_WARNING_S, user_code._IMPORT_TIMEOUT_S = 0.1, 0.2
folder = os.getcwd()
try:
    user_code.import_user_module("attack")
except Exception as error:
    print(user_code.describe_exception(error), os.getcwd() == folder, file=sys.stderr)
    sys.exit(2)
"""


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_module_ends_the_command_with_a_message_and_its_code(attack, tmp_path):
    text, message = ATTACKS[attack]
    (tmp_path / "attack.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=30.0, check=False,
    )  # fmt: skip
    assert (ended.returncode, f"{message} True\n" in ended.stderr) == (2, True), ended.stderr

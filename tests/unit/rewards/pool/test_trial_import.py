"""Modules of reward functions are imported in a confined process, whatever they do to it."""

import os
import sys
import time
from pathlib import Path

import pytest

from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool import sandbox
from rlpack.rewards.pool.call_queue import PoolSettings
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.pool.trial_import import import_functions

F = "def f(completion, answer, level=0): return 0.0\n"
# Ways in which a module can end or block the process that imports it, and what the error says.
ENDINGS = {
    "os._exit(0)": ("import os\nos._exit(0)\n", "status 0"),
    "os._exit(3)": ("import os\nos._exit(3)\n", "status 3"),
    "os.abort()": ("import os\nos.abort()\n", "SIGABRT"),
    "closed descriptors": ("import os\nos.closerange(0, 64)\n" + F, "(exited with status|was killed by SIGKILL)"),
    "an exit from a thread": (
        "import os, threading, time\nthreading.Timer(0.1, os._exit, [0]).start()\ntime.sleep(9)\n",
        "status 0",
    ),
    "an exit at exit": ("import atexit, os\natexit.register(os._exit, 0)\nraise ValueError('x')\n", "ValueError: x"),
    "SystemExit": ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    "a hang": ("import time\ntime.sleep(1000)\n", "not imported within 1 s; do the work in the function"),
    "a busy loop": ("while True: pass\n", "not imported within 1 s; do the work in the function"),
}


def load(target: str, *, strict: bool = False, are_called: bool = True):
    settings = PoolSettings(processes=1, strict=strict, limits=Limits(memory_gb=2.0))
    return import_functions({"reward.function": target}, settings, 1.0, are_called=are_called)["reward.function"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of a name of its own."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        name = f"trial_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_module_that_reads_a_relative_path_is_told_where_it_is_imported(module, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a")
    name = module("WORDS = open('words.txt').read()\n" + F)
    with pytest.raises(RewardError, match=r"FileNotFoundError: .*; the working directory .* from __file__"):
        load(f"{name}:f")
    load(module(f"from pathlib import Path\nWORDS = (Path(__file__).parent / 'words.txt').read_text()\n{F}") + ":f")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_module_that_ends_or_blocks_its_process_is_an_error_that_names_it(ending, module, monkeypatch):
    text, message = ENDINGS[ending]
    if "within" in message:
        monkeypatch.setattr("rlpack.rewards.pool.trial_import._TIMEOUT_S", 1.0)
    name, start = module(text), time.monotonic()
    with pytest.raises(RewardError, match=f"^reward.function is '{name}:f', .*{message}"):
        load(f"{name}:f")
    assert time.monotonic() - start < 20.0
    assert name not in sys.modules


@pytest.mark.skipif(sandbox.unenforced(processes=False) != [], reason="this kernel has no strict sandbox")
def test_a_module_is_imported_in_the_sandbox_and_never_here(module, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "abc")
    outside = tmp_path / "outside"
    text = f"""
import os
try:
    open({str(outside)!r}, "w").write(os.environ["MY_SECRET"])
    here = "wrote"
except Exception as error:
    here = f"{{type(error).__name__}} {{'MY_SECRET' in os.environ}} {{os.getpid() == {os.getpid()}}}"
exec(f"def f(completion, *, told_{{here.replace(' ', '_')}}): return 0.0")
"""
    name = module(text)
    assert load(f"{name}:f", strict=True).required == ("completion", "told_PermissionError_False_False")
    assert not outside.exists()
    assert name not in sys.modules
    assert Path.cwd() != tmp_path


def test_the_signature_that_comes_back_is_that_of_the_function(module):
    signature = load(f"{module(F)}:f")
    assert (signature.kind, signature.columns, signature.required) == (
        "single",
        ("answer", "level"),
        ("completion", "answer"),
    )


def test_of_a_function_that_a_custom_role_calls_only_the_existence_is_checked(module):
    name = module("def f(anything): return 0.0\n")
    load(f"{name}:f", are_called=False)
    with pytest.raises(RewardError, match="its functions are: f"):
        load(f"{name}:g", are_called=False)
    with pytest.raises(RewardError, match="doesn't name the texts"):
        load(f"{name}:f")


@pytest.mark.parametrize("target", ["json.no_such_module:f", "json.decoder.deeper:f"])
def test_a_module_that_a_package_lacks_is_named(target):
    with pytest.raises(RewardError, match=f"^reward.function is '{target}', .* can't be imported: ModuleNotFoundError"):
        load(target)


def test_of_several_functions_the_broken_one_is_named(module):
    good, bad = module(F), module("import os\nos._exit(7)\n")
    targets = {"reward.functions.a.function": f"{good}:f", "reward.functions.b.function": f"{bad}:f"}
    with pytest.raises(RewardError, match=r"^reward\.functions\.b\.function is .*status 7"):
        import_functions(targets, PoolSettings(processes=1), 5.0, are_called=True)

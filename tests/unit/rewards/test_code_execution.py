"""Untrusted programs of a policy, in confined processes."""

import os
import time
from pathlib import Path

import pytest

from rlpack.rewards.code_execution import _run, unit_tests
from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool.call_queue import FunctionSpec, PoolSettings
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.pool.pool import RewardPool

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="the sandbox needs Linux")
DOUBLE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
ADD = "```\na, b = map(int, input().split())\nprint(a + b)\n```"
ADD_LINES = "```\nprint(int(input()) + int(input()))\n```"
FORWARD = "from dataclasses import dataclass, fields\n@dataclass\nclass Node:\n    left: 'Node' = None"
HOLDS, FAILS = "assert double(2) == 4", "assert double(2) == 5"


@pytest.mark.parametrize(
    ("completion", "tests", "reward", "share"),
    [
        (DOUBLE, HOLDS, 1.0, 1.0),
        (DOUBLE, FAILS, 0.0, 0.0),
        (DOUBLE, [HOLDS, FAILS, HOLDS, HOLDS], 0.0, 0.75),
        (DOUBLE, f'["{HOLDS}", "{FAILS}"]', 0.0, 0.5),
        ("def double(x): return x + x", HOLDS, 1.0, 1.0),
        ("def double(x): return", HOLDS, 0.0, 0.0),
        ("double(", HOLDS, 0.0, 0.0),
        ("", HOLDS, 0.0, 0.0),
        ("\ud800", HOLDS, 0.0, 0.0),
        (f"```python\nraise SystemExit\n```{DOUBLE}", HOLDS, 1.0, 1.0),
        (f"First:\n```bash\npip install numpy\n```\n\n{DOUBLE}\n```text\n4\n```", HOLDS, 1.0, 1.0),
        (FORWARD, "assert fields(Node)[0].name == 'left'", 1.0, 1.0),
        (f"from __future__ import annotations\n{FORWARD}", "assert fields(Node)[0].name == 'left'", 1.0, 1.0),
        (ADD, [{"input": "1 2", "output": "3\n"}, {"input": "5 5", "output": "10"}], 1.0, 1.0),
        (ADD, {"inputs": ["1 2", "5 5"], "outputs": ["3", "11"]}, 0.0, 0.5),
        (ADD, '{"inputs": ["1 2"], "outputs": ["3 "]}', 1.0, 1.0),
        (ADD, [{"input": "1", "output": "1"}], 0.0, 0.0),
        (ADD_LINES, {"inputs": [["1", "2"], "5\n5"], "outputs": [["3"], 10]}, 1.0, 1.0),
        (ADD_LINES, {"inputs": [["1", "2"]], "outputs": [["3", "3"]], "fn_name": None}, 0.0, 0.0),
        (ADD, [{"input": "1 2", "output": "3", "testtype": "stdin"}], 1.0, 1.0),
        (DOUBLE, None, None, None),
        (DOUBLE, [], None, None),
        (DOUBLE, " ", None, None),
    ],
)
def test_a_program_is_worth_the_tests_that_it_passes(completion, tests, reward, share):
    assert unit_tests(completion, tests) == reward
    assert unit_tests(completion, tests, partial=True) == share


@pytest.mark.parametrize(
    "tests",
    [
        7,
        {"inputs": ["1"], "outputs": []},
        [{"input": "1"}],
        ["a", 1],
        "[1]",
        {"fn_name": "double", "inputs": [[2]], "outputs": [4]},
        '{"fn_name": "double", "inputs": ["2"], "outputs": ["4"]}',
        {"inputs": [[2]], "outputs": [[4]]},
        {"inputs": [None], "outputs": ["4"]},
        [{"input": "2", "output": "4", "testtype": "functional"}],
        [{"input": {"x": 2}, "output": "4"}],
    ],
)
def test_tests_of_another_form_are_refused(tests):
    with pytest.raises(RewardError, match="give statements"):
        unit_tests(DOUBLE, tests)


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise KeyboardInterrupt",
        "def double(x):\n    import os\n    os._exit(0)",
        "import sys; sys.stdin.read()",
        "print('0' * (2 << 20))\ndef double(x): return 4",
        "x = bytearray(2 << 30)\ndef double(x): return 4",
        "import os\nwhile True: os.fork()",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef double(x): return 4",
        "import socket\nsocket.socket()\ndef double(x): return 4",
        "open('/tmp/rlpack-program', 'w')\ndef double(x): return 4",
        "import os\nos.environ['PYTEST_CURRENT_TEST']\ndef double(x): return 4",
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()\ndef double(x): return 4",
        "import os\nassert len(os.listdir('/proc/self/fd')) > 4\ndef double(x): return 4",
    ],
)
def test_a_program_that_tries_to_cheat_or_escape_passes_no_test(program):
    assert unit_tests(program, HOLDS) == 0.0
    assert not Path("/tmp/rlpack-program").exists()


def test_a_program_that_does_not_end_is_ended():
    began = time.monotonic()
    assert unit_tests("while True: pass", HOLDS, timeout_s=0.5) == 0.0
    assert unit_tests("import time\ndef double(x): time.sleep(60)", [HOLDS], timeout_s=0.5) == 0.0
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize("program", ["while True: pass", "raise SystemExit", "raise KeyboardInterrupt"])
def test_passed_tests_count_whatever_another_test_does(program):
    tests = ["assert True", "assert f()", "assert True"]
    share = unit_tests(f"def f():\n    {program}", tests, timeout_s=1.0, partial=True)
    assert share == pytest.approx(1 / 3 if program.startswith("while") else 2 / 3)


def test_no_test_runs_after_the_first_that_fails():
    program = "n = int(input())\nwhile n > 1: pass\nprint(n)"
    tests = [{"input": "1", "output": "1"}, *[{"input": "2", "output": "2"}] * 20]
    began = time.monotonic()
    assert unit_tests(program, tests, timeout_s=0.5) == 0.0
    assert time.monotonic() - began < 5.0


def test_a_program_prints_a_set_in_the_same_order_each_time():
    outputs = {_run("print({*map(str, range(50))})", "", 5.0, 1.0).output for _ in range(3)}
    assert len(outputs) == 1
    assert outputs != {""}


def test_a_program_imports_nothing_from_its_folder_or_home_and_libraries_use_one_thread():
    program = """
import os, pathlib, site, sys
folder = pathlib.Path(__file__).parent
assert not [entry for entry in sys.path if entry == "" or pathlib.Path(entry).is_relative_to(folder)]
assert not site.ENABLE_USER_SITE
assert os.environ["OPENBLAS_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"] == "1"
print("isolated")
"""
    assert _run(program, "", 5.0, 1.0).output == "isolated\n"


@pytest.mark.parametrize("strict", [False, True], ids=["limits", "strict"])
def test_programs_run_in_the_pool_where_processes_are_allowed(strict):
    for processes, problem in ((1, None), (0, "error")):
        settings = PoolSettings(limits=Limits(processes=processes), strict=strict)
        pool = RewardPool({"tests": FunctionSpec("rlpack.rewards.code_execution:unit_tests")}, settings)
        try:
            columns = {"prompt": ["p"] * 2, "completion": [DOUBLE, "while True: fork()"], "tests": [HOLDS, HOLDS]}
            found = pool.run(columns, 2)["tests"]
        finally:
            pool.close()
        assert [result.problem for result in found] == [problem] * 2
        if problem:
            assert "set reward.subprocesses=1" in found[0].detail
        else:
            assert [result.value for result in found] == [1.0, 0.0]

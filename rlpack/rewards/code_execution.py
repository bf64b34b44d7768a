"""Reward for code: run the policy's program against unit tests.

Each program runs in a fresh subprocess: no network, no file access outside its own directory, no child processes, and
bounded memory, output and time. This is the confinement of `reward.sandbox=strict`, and applies whatever that key is
set to. If the kernel can't provide it, no program runs.
"""

import json
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlpack.rewards.answer_part import after_thinking
from rlpack.rewards.code_blocks import program_of
from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool.limits import THREAD_VARS
from rlpack.rewards.pool.sandbox import SandboxError, confine

_MAX_OUTPUT_BYTES = 1 << 20
# One thread: the threads of a numerical library reserve address space, on many cores more than the limit.
_ENV_VARS = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **dict.fromkeys(THREAD_VARS, "1")}
# As with -I, no import comes from the program's folder or the user's home, but PYTHONHASHSEED counts.
_OPTIONS = ("-P", "-s", "-B")
# The program runs first, as a module that dataclasses and pickle find by name; then its tests are read from the input.
# Each passed test is reported at once, with a random token that arrives with the tests, so a program that exits early
# passes none. A program that reads the rest of the input itself could learn the token; only tests of input and output
# can't be cheated.
_HARNESS = """
import json, sys, types
sys.modules["program"] = program = types.ModuleType("program")
exec(compile(json.loads(sys.stdin.readline()), "program", "exec"), vars(program))
tests, token, write = *json.loads(sys.stdin.readline()), sys.__stdout__.write
for number, test in enumerate(tests):
    try:
        exec(compile(test, "test", "exec"), vars(program))
    except BaseException:
        continue
    write(f"\\n{token} {number}\\n")
    sys.__stdout__.flush()
"""


@dataclass(frozen=True)
class _ProgramOutput:
    """What a program wrote, and whether it exited with status 0 in time."""

    succeeded: bool
    output: str


def unit_tests(
    completion: str, tests: object, *, timeout_s: float = 5.0, memory_gb: float = 1.0, partial: bool = False
) -> float | None:
    """Return 1 if the program passes all tests, else 0; None if there are no tests.

    The program is the completion's last code block whose fence has the tag `python`, `python3` or `py`; if there is
    none, the last block without a tag, or else the last block. Without blocks, it is the whole completion, or the text
    before its only fence, since a prompt may end with the opening fence. What a model thinks before `</think>` isn't
    part of the completion here.

    Args:
        completion: the policy's response.
        tests: statements such as `assert double(2) == 4`, as one string (one test) or a list of strings (one test
            each), executed after the program in its process. For programs that read stdin and write stdout: a list of
            `{"input": text, "output": text}`, or `{"inputs": [...], "outputs": [...]}`, one process each. A text may
            be a list of lines. Either may be encoded as a JSON string. Trailing whitespace of lines and of the output
            is ignored.
        timeout_s: deadline of each process; `reward.timeout_s` has to cover all processes of a row.
        memory_gb: address space of each process.
        partial: return the fraction of tests passed.

    Raises:
        RewardError: the tests have another format, such as the arguments of a function that they name (`fn_name`,
            `"testtype": "functional"`), or `reward.subprocesses` is 0.
    """
    cases = _parse_tests(tests)
    if not cases:
        return None
    program = program_of(after_thinking(completion))
    if isinstance(cases[0], str):
        passed = _count_passed_statements(program, [str(case) for case in cases], timeout_s, memory_gb)
        return passed / len(cases) if partial else float(passed == len(cases))
    passed = 0
    for stdin, expected in cases:
        run = _run(program, stdin, timeout_s, memory_gb)
        passes = run.succeeded and _stripped_lines(run.output) == _stripped_lines(expected)
        passed += passes
        if not partial and not passes:
            break
    return passed / len(cases) if partial else float(passed == len(cases))


def _parse_tests(tests: object) -> Sequence[str] | Sequence[tuple[str, str]]:
    """Return the tests as statements, or as pairs of input and output."""
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            tests = json.loads(tests)
    match tests:
        case None:
            return []
        case str():
            return [tests] if tests.strip() else []
        case [*items] if all(isinstance(item, str) for item in items):
            return items
    if (pairs := _input_output_pairs(tests)) is not None:
        return pairs
    raise RewardError(
        f"tests are {str(tests)[:100]!r}; give statements (a string or a list of strings), a list of objects with "
        "input and output, or an object with inputs and outputs of equal length, all texts of stdin and stdout; write "
        "a test that calls a function as a statement, such as assert add(1, 2) == 3"
    )


def _input_output_pairs(tests: object) -> list[tuple[str, str]] | None:
    """Return tests of stdin and stdout as pairs of texts, None if they have another format.

    Datasets (APPS, TACO, LiveCodeBench) store the arguments of a function and its result in the same keys; a program
    would not find them in its input.
    """
    match tests:
        case {"inputs": [*inputs], "outputs": [*outputs], **more} if len(inputs) == len(outputs):
            pairs = list(zip(inputs, outputs, strict=True))
            is_call = bool(more.get("fn_name"))
        case [*items] if all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in items):
            pairs = [(item["input"], item["output"]) for item in items]
            is_call = any(item.get("testtype") == "functional" for item in items)
        case _:
            return None
    if is_call or not all(_is_text(value) for pair in pairs for value in pair):
        return None
    return [(_join_lines(stdin), _join_lines(expected)) for stdin, expected in pairs]


def _is_text(value: object) -> bool:
    return isinstance(value, str | int | float) or (
        isinstance(value, list) and all(isinstance(line, str) for line in value)
    )


def _join_lines(text: object) -> str:
    return "\n".join(text) if isinstance(text, list) else str(text)


def _count_passed_statements(program: str, tests: list[str], timeout_s: float, memory_gb: float) -> int:
    """Count the statements that pass after the program, in one process."""
    token = secrets.token_hex(16)
    stdin = f"{json.dumps(program)}\n{json.dumps([tests, token])}\n"
    lines = set(_run(_HARNESS, stdin, timeout_s, memory_gb).output.splitlines())
    return sum(f"{token} {number}" in lines for number in range(len(tests)))


def _run(program: str, stdin: str, timeout_s: float, memory_gb: float) -> _ProgramOutput:
    """Run a program in a fresh, confined process."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8", errors="replace")

        def restrict() -> None:
            _limit_resources(timeout_s, memory_gb)
            confine(path.parent, strict=True, processes=False)

        try:
            completed = subprocess.run(
                [sys.executable, *_OPTIONS, str(path)], input=stdin.encode(errors="replace"), stdout=output,
                stderr=subprocess.DEVNULL, cwd=folder, env={**_ENV_VARS, "HOME": folder, "TMPDIR": folder},
                timeout=timeout_s, check=False, preexec_fn=restrict,
            )  # fmt: skip
            succeeded = completed.returncode == 0
        except subprocess.TimeoutExpired:
            succeeded = False
        except PermissionError as error:
            raise RewardError(
                "unit_tests starts subprocesses, but reward.subprocesses is 0; set reward.subprocesses=1"
            ) from error
        except subprocess.SubprocessError as error:  # raised, without the message, if `restrict` raises
            raise SandboxError("programs can't be confined here, so none is run; see reward.sandbox=strict") from error
        output.seek(0)
        return _ProgramOutput(succeeded, output.read(_MAX_OUTPUT_BYTES).decode(errors="replace"))


def _limit_resources(timeout_s: float, memory_gb: float) -> None:
    """Bound CPU time, memory and file size of this process."""
    limits: list[tuple[int, int]] = [
        (resource.RLIMIT_CPU, int(timeout_s) + 1),
        (resource.RLIMIT_AS, int(1e9 * memory_gb)),
        (resource.RLIMIT_FSIZE, _MAX_OUTPUT_BYTES),
    ]
    for kind, limit in limits:
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

"""Programs that the policy wrote, judged by unit tests.

A program is never run in the process that judges it: it gets a fresh one below it, without network, without files but
those in its own directory, without processes of its own, with bounded memory, output and time. So it is confined as
`reward.sandbox=strict` is, whatever is set there, and where the kernel can't do that, it is not run at all.
"""

import json
import re
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool.sandbox import SandboxError, confine

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_OUTPUT_BYTES = 1 << 20
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
# The program comes first. Its tests are read when it has run, and each that holds is noted by a word that comes with
# them: a program that ends the process early passes none. One that reads the rest of the input itself learns the word;
# tests of input and output are what no program can fool.
_HARNESS = """
import json, sys
space = {"__name__": "program"}
exec(compile(json.loads(sys.stdin.readline()), "program", "exec"), space)
tests, word, write = *json.loads(sys.stdin.readline()), sys.__stdout__.write
for number, test in enumerate(tests):
    try:
        exec(compile(test, "test", "exec"), space)
    except Exception:
        continue
    write(f"\\n{word} {number}\\n")
sys.__stdout__.flush()
"""


@dataclass(frozen=True)
class _Ran:
    """How a program ended: whether by itself and well, and what it wrote."""

    well: bool
    output: str


def unit_tests(
    completion: str, tests: object, *, timeout_s: float = 5.0, memory_gb: float = 1.0, partial: bool = False
) -> float | None:
    """Return 1 for a program that passes all of its tests, else 0; None for a row without tests.

    The program is the last block between ```` ``` ```` in the completion, or all of it where there is none.

    Args:
        completion: what the policy wrote.
        tests: statements such as `assert double(2) == 4`, as one text (one test) or as a list of texts (a test each),
            run after the program in its process; or for programs that read and write, a list of
            `{"input": text, "output": text}`, or `{"inputs": [...], "outputs": [...]}`, a process each. A text may
            hold either as JSON. Space at the ends of lines and of the output doesn't count.
        timeout_s: deadline of a process; `reward.timeout_s` has to leave room for all of a row's.
        memory_gb: address space of a process.
        partial: return the share of tests passed.

    Raises:
        RewardError: tests have another form, or `reward.subprocesses` is 0.
    """
    cases = _cases(tests)
    if not cases:
        return None
    blocks = _BLOCK.findall(completion)
    program = blocks[-1] if blocks else completion
    if isinstance(cases[0], str):
        passed = _holding(program, [str(case) for case in cases], timeout_s, memory_gb)
    else:
        passed = 0
        for given, expected in cases:
            ran = _run(program, given, timeout_s, memory_gb)
            passed += ran.well and _lines(ran.output) == _lines(expected)
            if not partial and not passed:
                break
    return passed / len(cases) if partial else float(passed == len(cases))


def _cases(tests: object) -> Sequence[str] | Sequence[tuple[str, str]]:
    """Return the tests, as statements or as pairs of input and output."""
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            tests = json.loads(tests)
    match tests:
        case None:
            return []
        case str():
            return [tests] if tests.strip() else []
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            return [(str(given), str(expected)) for given, expected in zip(inputs, outputs, strict=True)]
        case [*items] if all(isinstance(item, str) for item in items):
            return items
        case [*items] if all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in items):
            return [(str(item["input"]), str(item["output"])) for item in items]
    raise RewardError(
        f"tests are {str(tests)[:100]!r}; give statements (a text or a list of texts), a list of objects with input "
        "and output, or an object with inputs and outputs of one length"
    )


def _holding(program: str, tests: list[str], timeout_s: float, memory_gb: float) -> int:
    """Return how many statements hold after the program, in one process."""
    word = secrets.token_hex(16)
    given = f"{json.dumps(program)}\n{json.dumps([tests, word])}\n"
    ran = _run(_HARNESS, given, timeout_s, memory_gb)
    lines = set(ran.output.splitlines())
    return sum(f"{word} {number}" in lines for number in range(len(tests)))


def _run(program: str, given: str, timeout_s: float, memory_gb: float) -> _Ran:
    """Run a program on its input in a fresh, confined process."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        place = Path(folder)
        (place / "program.py").write_text(program, encoding="utf-8", errors="replace")

        def give_up_rights() -> None:
            bounds: list[tuple[int, int]] = [
                (resource.RLIMIT_CPU, int(timeout_s) + 1),
                (resource.RLIMIT_AS, int(1e9 * memory_gb)),
                (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
            ]
            for kind, bound in bounds:
                hard = resource.getrlimit(kind)[1]
                bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
                resource.setrlimit(kind, (bound, bound))
            confine(place, strict=True, processes=False)

        command = [sys.executable, "-I", "-B", str(place / "program.py")]
        try:
            ran = subprocess.run(
                command, input=given.encode(errors="replace"), stdout=output, stderr=subprocess.DEVNULL, cwd=place,
                env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder}, timeout=timeout_s, check=False,
                preexec_fn=give_up_rights,
            )  # fmt: skip
            well = ran.returncode == 0
        except subprocess.TimeoutExpired:
            well = False
        except PermissionError as error:
            raise RewardError(
                "unit tests run programs, and reward.subprocesses is 0; set reward.subprocesses=1"
            ) from error
        except subprocess.SubprocessError as error:  # so comes, without its words, what `give_up_rights` raises
            raise SandboxError("programs can't be confined here, so none is run; see reward.sandbox=strict") from error
        output.seek(0)
        return _Ran(well, output.read(_OUTPUT_BYTES).decode(errors="replace"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

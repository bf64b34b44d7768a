"""Run the benchmarks that RESULTS.md names, and write what they print into it.

    python -m benchmarks.report [--only WORD] [--skip WORD]

A place in RESULTS.md looks like this; what stands between the two marks is replaced:

    <!-- output of: python benchmarks/plan.py -->
    <!-- end -->

Exits with 1 if a benchmark missed a bar or failed; its output is written all the same. A tree with uncommitted
changes is refused, because nobody could repeat its results.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
_PLACE = re.compile(r"(<!-- output of: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_LONGEST_S = 1800.0
_PACKAGES = ("torch", "transformers", "ray", "numpy", "numba")


def main() -> int:
    """Run, write, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only the commands that contain this word")
    parser.add_argument("--skip", help="leave out the commands that have this word")
    arguments = parser.parse_args()
    places = _PLACE.findall(RESULTS.read_text(encoding="utf-8"))
    commands = [command for _, command, _ in places if arguments.only in command]
    commands = [command for command in commands if not (arguments.skip and arguments.skip in command)]
    if not commands:
        parser.error(f"no command in {RESULTS} fits; it has: {', '.join(command for _, command, _ in places)}")
    where, failed = surroundings(), []
    if "-dirty," in where:
        parser.error("the tree has uncommitted changes; commit them first, so that the results name what was measured")
    for command in commands:
        print(f"$ {command}", flush=True)
        code, output = run(command)
        print(output, flush=True)
        write(RESULTS, command, f"{where}\n\n{output}" + (f"\nexit code {code}" if code else ""))
        failed += [command] * bool(code)
    print(f"written to {RESULTS}; " + (f"missed a bar or failed: {', '.join(failed)}" if failed else "all bars kept"))
    return int(bool(failed))


def run(command: str) -> tuple[int, str]:
    """Return the exit code of a command that begins with `python`, and what it prints."""
    words = [sys.executable if word == "python" else word for word in command.split()]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "RAY_DEDUP_LOGS": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment, check=False, timeout=_LONGEST_S, cwd=RESULTS.parents[1]
    )
    # A missed bar and a crash both end with 1; only the latter has anything to say on its standard error.
    return done.returncode, (done.stdout + (done.stderr if done.returncode else "")).rstrip()


def write(results: Path, command: str, output: str) -> None:
    """Put the output of a command into its place."""

    def filled(place: re.Match[str]) -> str:
        return f"{place[1]}```text\n{output}\n```\n{place[3]}" if place[2] == command else place[0]

    results.write_text(_PLACE.sub(filled, results.read_text(encoding="utf-8")), encoding="utf-8")


def surroundings() -> str:
    """Return date, commit, machine and versions."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    where = f"{processor()}, Python {platform.python_version()}"
    return f"{date.today()}, commit {commit.stdout.strip() or 'unknown'}, {where}\n{packages}"


def processor() -> str:
    """Return the name of the processor and how many of its cores there are."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())

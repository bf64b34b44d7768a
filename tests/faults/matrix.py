"""The fault matrix: the cells of `tests.faults.table` in real runs, and a table of what came of them.

    python -m tests.faults.matrix [--only WORD ...] [--jobs 3] [--waiting 4] [--seconds S] [--write FILE]

Runs the cells whose names contain all words, as many as fit into the time. Cells that a run survives share runs; each
of the others has a run of its own. Cells that ended as expected according to FILE are not run again. Exits with 1
unless all outcomes are the expected ones.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from tests.faults.runs import DEADLINE_S, Finding, end_of, settings, shared, started, wait
from tests.faults.table import FAULTS, LAYOUTS, PHASES, RANKED, ROLES, Case, cases, reason_against
from tests.forked_workers import worker_servers

# Of a run with faults; the last is undisturbed, since a role that isn't called any more isn't started again.
STEPS = 4
# Of a run that goes on for longer than `placement.ray_timeout_s` after its first step.
STEPS_OF_A_LONG_RUN = 40
# A role's restarts in one run.
MOST = 3
# In which order a step reaches the phases; scores and the reference's log-probs are waited for before its advantages.
IN_A_STEP = ("start", "generate", "score", "plan", "log-probs", "advantages", *PHASES[PHASES.index("update") :])


class Runs:
    """Runs with faults, and the undisturbed ones that they are compared with."""

    def __init__(self, folder: Path, workers: str | None = None) -> None:
        """Keep the runs in a folder; `workers` is the folder of the servers that fork Ray's workers, if any."""
        self.folder = folder
        self._workers = workers
        self._numbers = count()
        self._lock = Lock()

    def undisturbed(self, layout: str, steps: int) -> Path:
        """Return the directory of a run without faults; it is made once."""
        folder = self.folder / f"undisturbed {layout} {steps}".replace(" ", "_")
        with self._lock:
            if not folder.exists():
                with started(folder, [], settings(layout, steps), workers=self._workers) as command:
                    code, _ = wait(command, is_stopped=False)
                    assert code == 0, command.err
        return folder / "run"

    def find(self, batch: Sequence[Case]) -> dict[Case, Finding]:
        """Run cases that share a run, or one that has its own."""
        folder = self.folder / f"run_{next(self._numbers)}"
        layout = batch[0].layout
        if batch[0].outcome in ("repeated", "unchanged"):
            return shared(folder, batch, self.undisturbed(layout, STEPS), STEPS, self._workers)
        (case,) = batch
        if case.outcome == "resumed":
            return {case: end_of(folder, case, self.undisturbed(layout, 2), 2, 2, self._workers)}
        # A run notices that a daemon is stopped after some seconds, in which its last step may end.
        is_slowly_noticed = case.role in ("raylet", "GCS") and case.fault == "stop"
        return {case: end_of(folder, case, folder, STEPS_OF_A_LONG_RUN if is_slowly_noticed else 1, 1, self._workers)}


def is_waiting(batch: Sequence[Case]) -> bool:
    """Return whether a run mostly waits for a deadline."""
    return batch[0].outcome == "repeated" or (batch[0].role in RANKED and batch[0].fault in ("stop", "lost reply"))


def batches(chosen: Sequence[Case]) -> Iterator[list[Case]]:
    """Yield the cases by runs: at most `MOST` restarts of a role in each, and all that only slow things down in one."""
    for layout in LAYOUTS:
        own = [case for case in chosen if case.layout == layout]
        if slow := [case for case in own if case.outcome == "unchanged"]:
            yield slow
        of_role = {role: [case for case in own if case.role == role and case.outcome == "repeated"] for role in ROLES}
        while any(of_role.values()):
            run = [case for waiting in of_role.values() for case in _next(waiting)]
            yield run
            of_role = {role: [case for case in waiting if case not in run] for role, waiting in of_role.items()}
    yield from ([case] for case in chosen if case.outcome in ("error", "resumed"))


def _next(waiting: Sequence[Case]) -> list[Case]:
    """Return the cases of one role that share the next run, one of its start among them, by their steps.

    Those that only the next step notices come last: else the next fault could hit a process that is stopped or dead
    already, and one restart would be that of both.
    """
    starts = [case for case in waiting if case.phase == "start"][:1]
    others = [case for case in waiting if case.phase != "start"][: MOST - len(starts)]
    return [*starts, *sorted(others, key=lambda case: IN_A_STEP.index(case.phase))]


def table(known: Mapping[str, Sequence[Any]]) -> str:
    """Return a Markdown table of outcomes and seconds, by the cells' names; it has a line for role, layout and fault.

    A cell that was as expected has the seconds until the error was said or, for one that was repeated, those of a
    restart in its run.
    """
    lines = [f"| target | pool | fault | expected | {' | '.join(PHASES)} |", "|---" * (4 + len(PHASES)) + "|"]
    every = {(case.role, case.phase, case.fault, case.layout): case for case in cases()}
    for role, layout, fault in dict.fromkeys((case.role, case.layout, case.fault) for case in every.values()):
        own = [every.get((role, phase, fault, layout)) for phase in PHASES]
        outcome = next(case.outcome for case in own if case is not None)
        marks = " | ".join(_mark(case, known) for case in own)
        lines.append(f"| {role} | {layout} | {fault} | {outcome} | {marks} |")
    return "\n".join(lines)


def _mark(case: Case | None, known: Mapping[str, Sequence[Any]]) -> str:
    """Return what a table says of a cell."""
    if case is None:
        return "–"
    if str(case) not in known:
        return "?"
    outcome, seconds = known[str(case)]
    if outcome != case.outcome:
        return "**not**"
    return f"{seconds:.0f}" if outcome in ("error", "repeated") else "ok"


def impossible() -> str:
    """Return a Markdown list of the reasons why cells can't occur, with their numbers."""
    reasons = Counter(
        reason
        for role in ROLES
        for phase in PHASES
        for fault in FAULTS
        if (reason := reason_against(role, phase, fault)) is not None
    )
    return "\n".join(f"- {count} cells: {reason}." for reason, count in reasons.most_common())


def main(arguments: Sequence[str]) -> int:
    """Run the matrix, print what is not as expected, and write the table."""
    parser = argparse.ArgumentParser(description="Run the fault matrix.")
    parser.add_argument("--only", nargs="*", default=[], help="words that the names of the cells contain")
    parser.add_argument("--jobs", type=int, default=3, help="runs at the same time that need a core")
    parser.add_argument("--waiting", type=int, default=4, help="runs at the same time that wait for a deadline")
    parser.add_argument("--seconds", type=float, default=1800.0, help="start no run after this time")
    parser.add_argument("--write", type=Path, help="a JSON file with the findings, added to those in it")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if all(word in f"{case}, {case.outcome}" for word in options.only)]
    known = _read(options.write)
    chosen = [case for case in chosen if known.get(str(case), [None])[0] != case.outcome]
    findings: dict[Case, Finding] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults") as folder, ExitStack() as stack:
        runs = Runs(Path(folder), stack.enter_context(worker_servers()))

        def find(batch: list[Case]) -> dict[Case, Finding]:
            return runs.find(batch) if time.monotonic() - began < options.seconds else {}

        busy, waiting = (stack.enter_context(ThreadPoolExecutor(jobs)) for jobs in (options.jobs, options.waiting))
        futures = [(waiting if is_waiting(batch) else busy).submit(find, batch) for batch in batches(chosen)]
        for future in as_completed(futures):
            for case, finding in future.result().items():
                findings[case] = finding
                is_expected = finding.outcome == case.outcome
                mark = "ok" if is_expected else f"EXPECTED {case.outcome}"
                now = time.monotonic() - began
                sys.stdout.write(f"{now:.0f} s: {case}: {finding.outcome}, {finding.seconds:.1f} s, {mark}\n")
                if not is_expected:
                    sys.stdout.write(finding.text[-3000:])
                sys.stdout.flush()
            if options.write is not None:
                _add(options.write, findings)
    unexpected = [case for case, finding in findings.items() if finding.outcome != case.outcome]
    known |= {str(case): [finding.outcome, finding.seconds] for case, finding in findings.items()}
    sys.stdout.write(f"\n{table(known)}\n\n{impossible()}\n\n")
    sys.stdout.write(
        f"{len(findings)} of {len(cases())} cells in {time.monotonic() - began:.0f} s, {len(unexpected)} unexpected; "
        f"no run took over {DEADLINE_S:g} s\n"
    )
    return int(bool(unexpected))


def _read(path: Path | None) -> dict[str, list[Any]]:
    """Return the findings in a file, outcome and seconds, by the cells' names."""
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def _add(path: Path, findings: dict[Case, Finding]) -> None:
    """Add findings to those in a file."""
    known = _read(path)
    known |= {str(case): [finding.outcome, round(finding.seconds, 1)] for case, finding in findings.items()}
    path.write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

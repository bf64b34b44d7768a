import io
import json
import os
import subprocess
import sys
import unicodedata
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from rlpack.observe import console as console_module
from rlpack.observe.console import Console, Sample
from rlpack.observe.text import shortened, visible

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m[bold red]big[/] [link=http://x]y[/link] :smile: \u202eright\ud800\nnext\r\x00"


def screen(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(RichConsole(file=written, force_terminal=terminal, width=60, highlight=False)), written


def test_a_step_is_one_line_with_its_metrics() -> None:
    console, written = screen()
    metrics = {"reward/mean": 0.4567, "packing/waste_ratio": 0.0123, "time/step_s": 1.5, "epoch": 0.0}
    console.line(3, "train", metrics, total=70)
    assert written.getvalue().split() == ["step", "3/70", "reward", "0.457", "waste", "1.2%", "1.50", "s"]
    assert written.getvalue().count("\n") == 1


def test_a_line_longer_than_the_screen_stays_one_line() -> None:
    console, written = screen()
    console.line(1, "train", {name: 1.0 for name, *_ in console_module.COLUMNS})
    assert written.getvalue().count("\n") == 1


def test_a_held_out_reward_is_an_accuracy_in_percent_only_if_every_reward_is_0_or_1() -> None:
    console, written = screen()
    metrics = {"evaluation/reward_sampled": 0.5, "evaluation/reward_greedy": 0.25, "evaluation/graded_rewards": 0.0}
    console.line(1, "evaluation", metrics)
    assert "held-out accuracy 50.0%  greedy 25.0%" in written.getvalue()
    console.line(2, "evaluation", metrics | {"evaluation/graded_rewards": 1.0})
    assert "held-out reward 0.500  greedy 0.250" in written.getvalue()


def test_each_evaluation_set_has_a_line_of_its_own():
    console, written = screen()
    metrics = {"evaluation/reward_sampled": 0.5, "evaluation/graded_rewards": 0.0, "time/step_s": 2.0}
    of_set = {"evaluation/math/reward_sampled": 0.125, "evaluation/math/graded_rewards": 3.0}
    empty = {"evaluation/empty/overlong": 3.0}
    console.line(20, "evaluation", metrics | of_set | empty | {"evaluation/other/loss": 1.5})
    lines = [line.split() for line in written.getvalue().splitlines()]
    assert lines == [
        ["evaluation", "20", "held-out", "accuracy", "50.0%", "2.00", "s"],
        ["math", "held-out", "reward", "0.125"],
        ["other", "held-out", "loss", "1.500"],
    ]


def test_quarantined_rows_show_only_when_there_are_some() -> None:
    console, written = screen()
    console.line(1, "train", {"reward/quarantined": 0.0})
    assert "quarantined" not in written.getvalue()
    console.line(2, "train", {"reward/quarantined": 3.0})
    assert "quarantined 3" in written.getvalue()
    console.line(2, "evaluation", {"evaluation/reward_greedy": 0.0, "evaluation/quarantined": 7.0})
    assert "quarantined 7" in written.getvalue()


def test_model_text_can_not_steer_the_terminal_nor_become_markup() -> None:
    console, written = screen()
    console.show_samples([Sample(HOSTILE, HOSTILE, HOSTILE, None)])
    shown = written.getvalue()
    assert not any(unicodedata.category(character) in {"Cc", "Cf", "Cs"} for character in shown.replace("\n", ""))
    assert shown.count("\n") == 4
    assert "[bold red]big[/]" in shown
    assert ":smile:" in shown
    assert "reward quarantined" in shown


@pytest.mark.parametrize("answer", [7, 0.5, [1, 2], {"a": 1}])
def test_an_answer_that_is_no_text_is_shown_as_its_text(answer: Any) -> None:
    console, written = screen()
    console.show_samples([Sample("p", "c", answer, 1.0)])
    assert f"answer {answer}" in written.getvalue()
    json.dumps(asdict(Sample("p", "c", answer)))


def test_on_a_terminal_only_our_own_styles_are_escape_sequences() -> None:
    plain, written_plain = screen(terminal=True)
    hostile, written_hostile = screen(terminal=True)
    plain.show_samples([Sample("p", "c", "a", 1.0)])
    hostile.show_samples([Sample(HOSTILE, HOSTILE, HOSTILE, 1.0)])
    assert written_plain.getvalue().count("\x1b") == written_hostile.getvalue().count("\x1b") > 0


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec=None)))
def test_visible_text_is_printable_on_one_line_and_can_be_written_as_utf8(text: str) -> None:
    shown = visible(text)
    assert all(c.isprintable() or unicodedata.category(c) == "Zs" for c in shown)
    assert len(shown.splitlines()) <= 1
    shown.encode("utf-8")


@given(st.text(st.characters(codec=None), max_size=300), st.integers(30, 200))
def test_shortened_text_keeps_its_limit_and_short_text_is_left_alone(text: str, limit: int) -> None:
    assert len(shortened(text, limit)) <= limit
    assert len(text) > limit or shortened(text, limit) == text


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(console_module.time, "monotonic", lambda: float(next(clock)))
    console, written = screen()
    with console.progress(100, "warm-up") as bar:
        for _ in range(10):
            bar.advance()
    assert written.getvalue().splitlines()[0] == "warm-up: 3 of 100"
    assert len(written.getvalue().splitlines()) < 5


def test_progress_on_a_terminal_is_a_bar_and_lines_go_above_it() -> None:
    console, written = screen(terminal=True)
    with console.progress(2, "work") as bar:
        bar.advance()
        console.note("a line")
        bar.advance()
    assert "work" in written.getvalue()
    assert "a line" in written.getvalue()


def test_a_table_aligns_its_numbers_and_ends_with_text() -> None:
    console, written = screen()
    console.columns([["", "mean", "highest", ""], ["a name", "1", "20,000", "[b]What it is.[/b]"]])
    assert written.getvalue().splitlines() == ["          mean  highest", "  a name     1   20,000  [b]What it is.[/b]"]


def test_no_samples_show_nothing() -> None:
    console, written = screen()
    console.show_samples([])
    assert written.getvalue() == ""


def test_a_closed_pipe_is_an_error_that_the_command_can_tell_from_others() -> None:
    script = "\n".join(
        [
            "from rlpack.observe.console import Console",
            "from rlpack.observe.errors import StandardOutputClosedError",
            "try:",
            "    Console().note('a')",
            "except StandardOutputClosedError:",
            "    raise SystemExit(7)",
        ]
    )
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert ended.returncode == 7


PRINTS = """
import logging
from rlpack.observe.console import Console, Sample
logging.basicConfig()
console = Console()
console.note("first")
console.show_samples([Sample("caf\u00e9", "\u6f22", None, 1.0)])
console.note("last")
"""


def test_a_full_disk_behind_standard_output_is_one_warning_and_later_lines_are_discarded() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.endswith("standard output can't be written (No space left on device), so nothing more is printed")


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("latin-1", "caf\u00e9 \\u6f22"), ("ascii", "caf\\xe9 \\u6f22"), ("utf-8", "caf\u00e9 \u6f22")],
)
def test_characters_that_standard_output_cannot_encode_are_escaped(encoding: str, shown: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    ended = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    words = ended.stdout.decode(encoding).split()
    assert [words[words.index(name) + 1] for name in ("prompt", "completion")] == shown.split()
    assert words[-1] == "last"

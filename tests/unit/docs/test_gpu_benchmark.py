"""The benchmark of `make bench-gpu`: its rows run at tiny sizes on a CPU, and one that fails stops no other."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.figures import Figure, Setup
from benchmarks.gpu.rows import ROWS, Outcome, Row, figures_of, run_row
from benchmarks.gpu.section import HEADING, part, table, update

TINY = Setup("cpu", tiny=True)
# `memory` starts processes (tests/distributed/models/test_memory_estimate.py), and `train` starts Ray.
IN_PROCESS = [name for name in ROWS if name not in ("memory", "train")]


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.filterwarnings("ignore")
def test_each_row_runs_on_a_cpu_and_keeps_its_bars_of_equality(name: str):
    threads = torch.get_num_threads()
    figures = list(figures_of(name, TINY))
    torch.set_num_threads(threads)
    assert figures
    assert all(figure.value and figure.kept is not False for figure in figures), figures
    assert any(figure.bar for figure in figures)


def test_bars_of_time_and_memory_are_judged_at_full_size_only():
    assert Setup("cuda").judged(False) is False
    assert TINY.judged(False) is None


def test_a_row_ends_at_its_deadline_and_a_crash_is_told_by_its_error():
    late = run_row("kernels", TINY, deadline_s=0.2)
    assert not late.is_kept
    assert late.failure == "ended at its deadline of 0.2 s"
    crashed = run_row("kernels", Setup("nosuchdevice", tiny=True))
    assert crashed.failure.startswith("failed with exit code 2")
    assert "nosuchdevice" in crashed.failure


def test_a_row_whose_packages_are_missing_names_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ROWS, "train", Row("title", "no_module:measure", 5, ("nosuchpackage", "torch")))
    assert run_row("train", TINY) == Outcome((), "not measured: it needs nosuchpackage")


def test_a_failed_row_stops_no_other_and_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    outcomes = {
        "kernels": Outcome((Figure("ratio", "0.5", "at least 0.9", False),)),
        "logprobs": Outcome((), "ended at its deadline of 3 s"),
        "memory": Outcome((Figure("ratio", "1.01", "within 10%", True),)),
    }
    monkeypatch.setattr("benchmarks.gpu.__main__.run_row", lambda name, setup, deadline_s: outcomes[name])
    page = tmp_path / "RESULTS.md"
    assert main(["--device", "cpu", "--tiny", "--only", *outcomes, "--output", str(page)]) == 1
    assert capsys.readouterr().out.endswith("failed or missed a bar: kernels, logprobs\n")
    written = page.read_text()
    assert "| ratio | 0.5 | at least 0.9 | MISSED |" in written
    assert "| **FAILED** | ended at its deadline of 3 s | | |" in written
    assert "| ratio | 1.01 | within 10% | kept |" in written


def test_a_row_that_runs_again_replaces_its_own_part(tmp_path: Path):
    page = tmp_path / "RESULTS.md"
    page.write_text("# Results\n\n## Before\n\ntext\n")
    setup = Setup("cuda")

    def write(name: str, value: str) -> None:
        outcome = Outcome((Figure("figure", value),))
        update(page, {name: part(name, outcome, "a \\1 machine", setup)})

    write("kernels", "old")
    write("memory", "other")
    page.write_text(page.read_text() + "\n## After\n\nmore\n")
    write("kernels", "new")
    write("grpo", "third")
    text = page.read_text()
    assert "old" not in text
    places = [text.index(word) for word in ("## Before", HEADING, "new", "other", "third", "## After", "more")]
    assert places == sorted(places)
    once = text
    write("kernels", "new")
    assert page.read_text() == once


def test_nothing_in_a_figure_breaks_the_table():
    lines = table(Outcome((Figure("a | b\nc", "1"),), "line\nbreak")).splitlines()
    assert [line.replace("\\|", "").count("|") for line in lines] == [5] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("no CUDA device is visible to PyTorch")
    assert error.count("\n") == 1


def test_full_sizes_on_a_cpu_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "--device cpu needs --tiny" in capsys.readouterr().err


def test_uneven_lengths_have_the_flops_of_one_sequence():
    from benchmarks.gpu.attention_kernels import uneven_lengths

    for longest in (2048, 16384):
        assert math.isclose(sum(length**2 for length in uneven_lengths(longest)), longest**2)

"""The results that `make bench` writes."""

from pathlib import Path

import pytest

from benchmarks import report

PAGE = """# Results
<!-- output of: python one.py -->
old
<!-- end -->
between
<!-- output of: python two.py -->
<!-- end -->
"""


def test_output_goes_to_the_place_of_its_command_alone(tmp_path: Path):
    page = tmp_path / "RESULTS.md"
    page.write_text(PAGE)
    report.write(page, "python one.py", "new \\1 figures")
    assert "new \\1 figures" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().endswith("between\n<!-- output of: python two.py -->\n<!-- end -->\n")
    once = page.read_text()
    report.write(page, "python one.py", "new \\1 figures")
    assert page.read_text() == once


def test_a_crash_is_told_by_its_traceback_and_a_missed_bar_by_its_output():
    code, output = report.run("python -c raise_SystemError")
    assert code == 1
    assert "NameError" in output
    assert report.run("python -c print(7)") == (0, "7")


def test_a_word_that_no_command_has_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["report", "--only", "nosuchword"])
    with pytest.raises(SystemExit):
        report.main()
    assert "no command in" in capsys.readouterr().err

"""README's figures are those of benchmarks/RESULTS.md, and those were measured on commits, not on changed trees."""

import re

import pytest

from benchmarks import readme_figures
from benchmarks.readme_figures import FIGURES, README, RESULTS, differences, filled
from rlpack.config.compose import compose

README_TEXT, RESULTS_TEXT = (path.read_text(encoding="utf-8") for path in (README, RESULTS))


def test_the_readme_has_the_figures_of_the_results():
    assert differences(README_TEXT, RESULTS_TEXT) == [], "run python -m benchmarks.readme_figures --write"
    assert filled(README_TEXT, RESULTS_TEXT) == README_TEXT


def test_every_figure_of_the_measurements_is_marked_and_every_one_is_used():
    table = README_TEXT.partition("## Measurements")[2].partition("\n## ")[0]
    results = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(results) > 5
    unmarked = [re.sub(r"<!-- figure: \w+ -->.*?<!-- end -->", "", cell) for cell in results]
    assert [cell for cell in unmarked if re.search(r"\d", cell)] == []
    assert set(re.findall(r"<!-- figure: (\w+) -->", README_TEXT)) == set(FIGURES)


@pytest.mark.parametrize(
    ("now", "then", "name", "shown"),
    [
        (r"8 optimizer steps, ms +[\d.]+", "8 optimizer steps, ms   12.8", "plan_ms", "13 ms"),
        (r"packed/fixed: [\d.]+", "packed/fixed: 3.456", "packed_fixed", "3.46 ×"),
        (r"\| 2 min 6 s \|", "| 59 s |", "train_alone", "0 min 59 s to 3 min 48 s"),
    ],
)
def test_a_new_result_is_a_difference_until_it_is_written(now: str, then: str, name: str, shown: str):
    results = re.sub(now, then, RESULTS_TEXT, count=1)
    (stale,) = differences(README_TEXT, results)
    assert stale.startswith(f"{name}: ")
    written = filled(README_TEXT, results)
    assert f"<!-- figure: {name} -->{shown}<!-- end -->" in written
    assert differences(written, results) == []


def test_a_figure_without_its_result_is_an_error():
    with pytest.raises(LookupError, match="no number after 'naive/rlpack:'"):
        FIGURES["memory"](RESULTS_TEXT.replace("naive/rlpack", "naive"))
    with pytest.raises(LookupError, match="no table under 'The default run'"):
        FIGURES["train_alone"]("")


def test_no_result_is_of_a_tree_with_uncommitted_changes():
    assert re.findall(r"commit \S*-dirty", RESULTS_TEXT) == []


def test_the_steps_of_recipes_are_those_of_their_presets():
    steps = readme_figures.column(RESULTS_TEXT, "Other recipes on the default task", "steps")
    assert set(readme_figures.RECIPES) | {"grpo"} == set(steps)
    composed = {recipe: compose([f"recipe={recipe}"]).trainer.steps for recipe in steps}
    assert {recipe: int(cell.split()[0]) for recipe, cell in steps.items()} == composed
    supervised = compose([]).sft_warmup.steps
    assert f"{supervised} supervised steps" in README_TEXT


def test_a_dirty_tree_is_not_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from benchmarks import report

    monkeypatch.setattr("sys.argv", ["report", "--only", "plan.py"])
    monkeypatch.setattr(report, "surroundings", lambda: "2026-01-01, commit abc-dirty, a machine")
    monkeypatch.setattr(report, "run", lambda command: pytest.fail("was run"))
    with pytest.raises(SystemExit):
        report.main()
    assert "uncommitted changes" in capsys.readouterr().err


def test_the_caption_of_times_names_the_recipes_that_were_timed():
    assert FIGURES["timed_recipes"](RESULTS_TEXT) == "DAPO (1), RLOO (3), ReMax (2)"
    timed = re.sub(r"(\| `grpo` \| 50 \| 6.2, 92.2 % \|) \|", r"\1 300 |", RESULTS_TEXT)
    assert FIGURES["timed_recipes"](timed) == "GRPO (1), DAPO (1), RLOO (3), ReMax (2)"
    assert FIGURES["recipe_times"](timed) == "1 min 36 s to 5 min 0 s"

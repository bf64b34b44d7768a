"""`rlpack plan` and `rlpack simulate` as a user calls them."""

from pathlib import Path

import numpy as np
import pytest

from rlpack.cli.main import main
from rlpack.observe.plan_record import PlanRecord
from rlpack.packing import Batching, make_plan


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_comparison_has_a_line_for_every_algorithm_and_mode(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "lengths.npy", np.array([60, 50, 40, 30, 20, 10] * 20))
    picture = tmp_path / "deep" / "plan.png"
    code, out, _ = run(capsys, "plan", str(tmp_path / "lengths.npy"), "--max-tokens", "100", "--ranks", "4",
                       "--compare", "--picture", str(picture))  # fmt: skip
    assert code == 0
    assert out.splitlines()[0] == (
        "120 sequences, 4,200 tokens, mean 35, longest 60; a budget of 100 needs at least 42 microbatches"
    )
    names = [line.split("  ")[0] for line in out.splitlines()[2:]]
    assert [name for name in names if not name.startswith("packed")][:2] == ["dynamic", "fixed"]
    assert sum(name.startswith("packed") for name in names) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_runs_directory_gives_the_lengths_of_its_last_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    PlanRecord.of(make_plan([5, 6, 7], Batching(max_tokens=16), dp_size=2)).write(tmp_path / "packing.json")
    code, out, _ = run(capsys, "plan", str(tmp_path), "--ranks", "2")
    assert (code, out.startswith("3 sequences, 18 tokens")) == (0, True)


def test_a_suggestion_can_be_given_to_train(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "lognormal", "--rows", "256", "--ranks", "4", "--suggest")
    assert code == 0
    assert "suggested: batching.mode=packed batching.max_tokens=" in out


def test_more_ranks_and_less_padding_make_steps_shorter(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", "zipf", "--rows", "2048", "--ranks", "2,16")
    assert code == 0
    cells = [line.replace(" × ", "-").split() for line in out.splitlines()[2:8]]
    steps = {name: float(step) for name, step, *_ in cells}
    assert steps["16-packed"] < steps["2-packed"] < steps["2-fixed"]
    assert steps["2-packed"] <= steps["2-dynamic"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "nowhere.jsonl"], 3, "rlpack plan: there is no file nowhere.jsonl"),
        (["plan", "zipf", "--ranks", "0"], 2, "rlpack plan: --ranks is 0; it has to be from 1 to"),
        (["plan", "zipf", "--max-tokens", "0"], 2, "rlpack plan: batching.max_tokens is 0"),
        (["plan", "zipf", "--max-tokens", "4", "--pad-to-multiple", "8"], 2, "pad_to_multiple is 8, over"),
        (["simulate", "zipf", "--ranks", "many"], 2, "--ranks is 'many'; give whole numbers with commas"),
        (["simulate", "zipf", "--tflops", "-1"], 2, "--tflops is -1; it has to be above 0"),
        (["plan", "zipf", "--memory-gb", "0.001", "--suggest"], 2, "slots fit into memory"),
    ],
)
def test_what_can_not_be_planned_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    found, _, err = run(capsys, *arguments)
    assert (found, len(err.splitlines())) == (code, 1)
    assert message in err


def test_a_directory_without_a_plan_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "plan", str(tmp_path))
    assert (code, "holds no packing.json" in err) == (3, True)


def test_sequences_over_the_budget_and_several_optimizer_steps_are_spoken_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "lengths.npy", np.array([60, 50, 40, 130]))
    options = ["--max-tokens", "100", "--ranks", "1", "--mini-batch-size", "2"]
    _, out, _ = run(capsys, "plan", str(tmp_path / "lengths.npy"), *options)
    assert "figures are of all 2 optimizer steps together" in out
    assert "1 sequences are over the budget: each has a microbatch of its own here" in out

"""What the benchmark of kills reads from a ledger, and its two-sample test."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.ledger import kolmogorov_smirnov, lineage, problems_of


def entry(step: int, uids: list[str], oldest: int = 1, newest: int = 1) -> dict[str, Any]:
    rows = [uid for uid in uids for _ in range(2)]
    versions = {"oldest": [oldest] * len(rows), "newest": [newest] * len(rows)}
    return {"step": step, "version": 2, "uids": rows, "lengths": [step] * len(rows), **versions}


def written(run_dir: Path, *entries: dict[str, Any], rest: str = "") -> Path:
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(one) + "\n" for one in entries) + rest)
    return run_dir


def test_steps_that_are_taken_again_replace_those_that_the_checkpoint_did_not_hold(tmp_path: Path):
    kept, lost, again = entry(1, ["a"]), entry(2, ["b"]), entry(2, ["b"], oldest=2, newest=2)
    found = lineage(written(tmp_path, kept, lost, entry(3, ["c"]), again, rest='{"step": 3, "ui'))
    assert found.entries == [kept, again]
    assert found.repeated == 2
    assert problems_of(found, ["a", "b", "c"], 1, 2, lead=1) == []
    assert found.lengths.tolist() == [1, 1, 2, 2]


def test_a_step_after_a_gap_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="has step 3 after step 1"):
        lineage(written(tmp_path, entry(1, ["a"]), entry(3, ["c"])))


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (entry(2, ["c"]), "step 2 trained on"),
        (entry(2, ["a"]), "1 prompts were trained on again"),
        (entry(2, ["b"], oldest=0), "lags are 1 to 2; they have to be 0 to 1"),
    ],
)
def test_prompts_that_are_missing_or_repeated_and_stale_tokens_are_problems(
    tmp_path: Path, second: dict[str, Any], text: str
):
    problems = problems_of(lineage(written(tmp_path, entry(1, ["a"]), second)), ["a", "b", "c"], 1, 2, lead=1)
    assert any(text in problem for problem in problems)


def test_the_two_sample_test_has_its_size_and_finds_a_shift():
    # Critical value of the asymptotic distribution at 5 %: c = 1.3581 (Smirnov 1948).
    size = 400
    shift = round(1.3581 / np.sqrt(size / 2) * size)
    distance, p = kolmogorov_smirnov(np.arange(size), np.arange(size) + shift)
    assert distance == pytest.approx(shift / size)
    assert p == pytest.approx(0.05, abs=0.004)
    generator = np.random.default_rng(3)
    rejected = sum(kolmogorov_smirnov(*generator.random((2, 200)))[1] < 0.05 for _ in range(1000))
    assert 25 <= rejected <= 70

"""Off-policy correction against numbers that verl's own functions return.

`verl_rollout_correction.json` has their inputs and results, and names the version. That lacks `seq_max_k1`, which is
ours, and `binary_kl`, which other versions have.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.algorithms.correction import (
    importance_weights,
    kept_tokens,
    mean_weight,
    mismatch_metrics,
    mismatch_sums,
    mismatch_totals,
)
from rlpack.batch.ragged import Ragged
from rlpack.config.sections.correction_settings import CRITERIA, bounds_of

GOLDEN = json.loads(Path(__file__).with_name("verl_rollout_correction.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = GOLDEN["cases"]


def columns(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, Ragged]:
    own, sampled = (Ragged.from_rows(case[name], torch.float64) for name in ("logprobs", "sampled"))
    return own.values, sampled.values, own.with_values(torch.ones_like(own.values, dtype=torch.bool))


def numbers(spec: str) -> list[float]:
    return [float(number) for number in spec.split("_")]


@pytest.mark.parametrize("case", CASES)
def test_importance_weights_are_verls(case: dict[str, Any]):
    own, sampled, mask = columns(case)
    for expected in case["weights"]:
        *lower, upper = numbers(str(expected["rollout_is_threshold"]))
        level = expected["rollout_is"]
        bounds = {"upper": upper, "lower": lower[0] if lower else None}
        found = mask.with_values(importance_weights(own, sampled, mask, level=level, **bounds))
        rows = [torch.tensor(row, dtype=torch.float64) for row in expected["result"]]
        if expected["rollout_is_batch_normalize"]:
            tokens = torch.tensor([row.numel() for row in rows])
            sums = torch.stack([row.double().sum() for row in found.rows()])
            found = found.with_values(found.values / mean_weight(sums, tokens, level))
        torch.testing.assert_close(found.values.double(), torch.cat(rows), rtol=1e-6, atol=1e-7, msg=str(expected))


@pytest.mark.parametrize("case", CASES)
def test_rejected_tokens_are_verls(case: dict[str, Any]):
    own, sampled, mask = columns(case)
    for expected in case["kept"]:
        names, specs = (expected[name].split(",") for name in ("rollout_rs", "rollout_rs_threshold"))
        values = {name: numbers(spec) for name, spec in zip(names, specs, strict=True)}
        bounds = {name: bounds_of(name, value if len(value) > 1 else value[0]) for name, value in values.items()}
        found = mask.with_values(kept_tokens(own, sampled, mask, bounds))
        assert ["".join(str(int(kept)) for kept in row) for row in found.rows()] == expected["result"], expected


def test_all_criteria_of_verl_are_compared_where_they_reject_a_part():
    parts = {
        each["rollout_rs"] for case in CASES for each in case["kept"] if set("".join(each["result"])) == {"0", "1"}
    }
    assert parts >= set(CRITERIA) - {"seq_max_k1", "binary_kl"}


@pytest.mark.parametrize("case", CASES)
def test_metrics_of_the_mismatch_are_verls(case: dict[str, Any]):
    own, sampled, mask = columns(case)
    totals = mismatch_totals(mismatch_sums(own, sampled, mask), mask.lengths)
    found = mismatch_metrics({name: total.item() for name, total in totals.items()})
    names = {"kl": "kl", "k3_kl": "k3", "ppl_ratio": "perplexity_ratio", "chi2_token": "chi2"}
    expected = {f"mismatch/{names[name]}": value for name, value in case["metrics"].items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)

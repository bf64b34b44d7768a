"""A dozen architectures, one for each kind of trap, through the benchmark of all of them."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.families import family_results
from rlpack.models.verified import is_verified

REPOSITORY = Path(__file__).parents[3]
# What each is an example of, and its verdicts packed and padded.
FAMILIES = {
    "qwen3": ("plain attention", "right", "right"),
    "gemma2": ("soft caps and windows", "right", "right"),
    "qwen3_moe": ("routed experts", "right", "right"),
    "gpt_oss": ("attention sinks", "refused", "right"),
    "gpt2": ("learned positions", "right", "right"),
    "bloom": ("a mask that carries the positions", "refused", "right"),
    "gpt_neo": ("attention without transformers' interface", "refused", "right"),
    "llama4_text": ("chunked attention", "refused", "right"),
    "modernbert-decoder": ("an output layer with a transform", "refused", "refused"),
    "exaone4": ("windows on some layers", "right", "right"),
    "mamba": ("recurrent layers", "refused", "right"),
    "qwen3_next": ("linear attention between attention layers", "refused", "right"),
    "cohere": ("scaled logits", "right", "right"),
    "xlm-roberta": ("an encoder made causal", "refused", "refused"),
    "axk2": ("sparse attention", "refused", "right"),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_right_or_refused_packed_and_padded(model_type: str):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {version('transformers')} has no {model_type}")
    _, packed, padded = FAMILIES[model_type]
    results = {r.setting: r for r in family_results(model_type, ("packed", "dynamic"), ("fp32",))}
    assert not [result for result in results.values() if result.verdict in {"wrong", "crashed"}]
    assert results["packed policy fp32"].verdict == packed
    assert results["dynamic policy fp32"].verdict == padded
    assert results["generate"].verdict == "right"
    if is_verified("qwen2", packed=True):  # this version of transformers is the one that was compared
        assert is_verified(model_type, packed=True) == (packed == "right")
        assert is_verified(model_type, packed=False) == (padded == "right")


def test_architectures_are_verified_for_one_version_of_transformers(monkeypatch):
    pinned = re.search(r"^transformers==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    monkeypatch.setattr("rlpack.models.verified.version", lambda name: pinned[1])
    assert is_verified("qwen2", packed=True)
    monkeypatch.setattr("rlpack.models.verified.version", lambda name: "99.0")
    assert not is_verified("qwen2", packed=True)
    assert f"every architecture that transformers {pinned[1]} can" in (
        (REPOSITORY / "docs" / "reference" / "families.md").read_text().lower()
    )


def test_bf16_is_right_within_its_own_rounding():
    results = family_results("qwen3_moe", ("packed", "dynamic"), ("bf16",))
    assert {result.verdict for result in results} == {"right"}

"""On every layout, scores, metrics and gradients are those of one row at a time on one rank."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.builders import MODEL, tiny_tokenizer
from tests.distributed.layouts import ranks
from tests.distributed.layouts.cases import COMBINED, DEEP, FAMILIES, LAYOUTS, RUNS_ALL, cases_of
from tests.distributed.layouts.truth import batch_with_values, expected
from tests.distributed.processes import on_ranks

# Cases that the same processes run: each makes process groups, whose threads stay.
MOST_CASES = 24


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folder of a tiny sequence classifier of each family."""
    folders = {}
    for name, family in (FAMILIES | DEEP).items():
        settings = {key: value for key, value in (MODEL | family).items() if key != "model_type"}
        config = AutoConfig.for_model(
            family["model_type"], vocab_size=len(tiny_tokenizer()), num_labels=1, pad_token_id=0, **settings
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = AutoModelForSequenceClassification.from_config(config)
        folders[name] = str(tmp_path_factory.mktemp(f"classifier-{name}"))
        model.save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one" and (RUNS_ALL or name not in COMBINED)])
def test_scores_metrics_and_gradients_are_those_of_each_row_alone(
    layout: str, classifiers: dict[str, str], tmp_path: Path
):
    cases = [(case, batch_with_values(case.family)) for case in cases_of(layout)]
    found = []
    for start in range(0, len(cases), MOST_CASES):
        part = cases[start : start + MOST_CASES]
        found += on_ranks(tmp_path, LAYOUTS[layout][0], ranks.run_cases, layout, part, classifiers)[0]
    for (case, _), (scores, metrics, gradients) in zip(cases, found, strict=True):
        truth = expected(case, classifiers[case.family])
        assert np.abs(scores - truth.scores.numpy()).max() < 1e-5, case
        assert truth.scores.abs().max() > 0.1
        # A mean may be far smaller than the scores that it is of.
        assert metrics == ([pytest.approx(truth.metrics, rel=1e-5, abs=1e-6)] if truth.metrics else []), case
        assert gradients.keys() == truth.gradients.keys(), case
        for name, gradient in truth.gradients.items():
            gap = torch.from_numpy(gradients[name]).double() - gradient
            assert gap.norm() <= 1e-4 * gradient.norm(), (case, name)


@pytest.mark.parametrize(
    ("layout", "family", "precision"),
    [
        ("cp2", "gemma3", "bf16"),
        ("tp2sp", "gemma3", "fp32"),
        ("ep2", "qwen3_moe", "bf16"),
        ("pp2", "gemma3", "fp32"),
        *[
            (layout, family, precision)
            for precision in ("fp32", "bf16")
            for layout, family in (
                *(("cp2", "gemma3"), ("gather2", "gemma3"), ("tp2", "gemma3"), ("tp2", "gemma2")),
                *(("tp2sp", "gemma3"), ("tp2sp", "deepseek_v3"), ("ep2", "qwen3_moe"), ("ep2", "deepseek_v3")),
                *(("pp2", "gemma3"), ("pp2vpp2", "gemma3_deep")),
            )
        ]
        * RUNS_ALL,
    ],
)
def test_a_model_that_ranks_share_passes_the_checks_of_a_start(
    tmp_path: Path, layout: str, family: str, precision: str
):
    assert on_ranks(tmp_path, 2, ranks.start_checked, layout, family, precision) == [True, True]


@pytest.mark.parametrize(("layout", "precision"), [("pp2tp2", "bf16"), *[("pp2cp2", "fp32")] * RUNS_ALL])
def test_scalar_heads_on_stages_that_share_tokens_pass_the_checks_of_a_start(
    layout: str, precision: str, classifiers: dict[str, str], tmp_path: Path
):
    arguments = (layout, "gemma3", precision, ("critic", "reward_model"), classifiers["gemma3"])
    assert on_ranks(tmp_path, 4, ranks.start_checked, *arguments) == [True] * 4


def test_a_layer_that_mixes_the_tokens_of_a_rank_is_refused(tmp_path: Path):
    for message in on_ranks(tmp_path, 2, ranks.mix_tokens, "cp2"):
        assert re.search(r"LlamaForCausalLM as the actor: row \d differs by .* if ranks share it", message)
        assert "set actor.parallel.cp=1" in message


# What is saved: an actor, an actor with adapters, and a critic, whose head is new. Reward models aren't trained.
SAVED = ("actor", "adapters", "critic")
# Parts of the names of weights that a step changes.
_PARTS = {"actor": ("embed_tokens",), "adapters": ("lora_A", "lora_B"), "critic": ("head.",)}


@pytest.mark.parametrize(
    ("family", "roles", "chain"),
    [
        ("llama", SAVED, ("hsdp2x2", "pp2dp2", "cp2tp2")),
        ("qwen3_moe", ("actor",), ("ep2", "tp2", "ep2tp2", "ep2")),
        ("llama_deep", ("actor",), ("pp2vpp2", "dp2", "pp2vpp2")),
        # FSDP over tensor parallelism, whose strided shards torch records as contiguous: 2×2, 4×1, 1×1, 2×2.
        ("llama", ("actor",), ("dp2tp2", "dp4", "one", "dp2tp2")),
        *[
            ("llama", SAVED, ("hsdp2x2", "pp2dp2", "one", "cp2tp2", "hsdp2x2")),
            ("qwen3_moe", ("actor",), ("ep2", "dp2ep2", "tp2", "one", "ep2tp2", "pp2ep2", "ep2")),
            ("llama_deep", SAVED, ("pp2vpp2", "dp2", "pp2vpp2")),
            (
                "llama",
                ("actor",),
                ("hsdp2x2", "dp4", "dp2tp2", "pp2dp2", "replicas2", "cp2tp2", "one", "pp2", "cp2", "tp2sp", "hsdp2x2"),
            ),
            (
                "qwen3_moe",
                ("actor",),
                ("ep2", "dp2", "tp2", "ep4", "one", "dp2ep2", "pp2ep2", "ep2tp2", "replicas2ep2", "cp2ep2", "ep2"),
            ),
            ("llama", SAVED[1:], ("hsdp2x2", "dp4", "one", "dp2tp2", "pp2", "replicas2", "hsdp2x2")),
            (
                "qwen3_moe_deep",
                SAVED,
                ("pp2vpp2", "pp4", "pp2vpp2dp2", "one", "pp2vpp2tp2", "tp2", "pp2vpp2ep2", "pp2", "pp2vpp2"),
            ),
            (
                "deepseek_v3",
                ("actor", "critic"),
                ("ep2tp2", "dp2", "tp2sp", "one", "ep2", "pp2tp2", "pp2ep2", "ep2tp2"),
            ),
        ]
        * RUNS_ALL,
    ],
)
def test_a_checkpoint_is_the_same_on_every_layout_that_it_passes_through(
    family: str, roles: tuple[str, ...], chain: tuple[str, ...], tmp_path: Path
):
    folders = [tmp_path / f"{place}-{layout}" for place, layout in enumerate(chain)]
    saved = on_ranks(tmp_path, LAYOUTS[chain[0]][0], ranks.save, chain[0], family, roles, folders[0])[0]
    assert saved.keys() == set(roles)
    for role, state in saved.items():
        moved = {name for name, value in state.items() if name.endswith("/exp_avg") and np.abs(value).max() > 0}
        assert all(any(part in name for name in moved) for part in _PARTS[role]), role
    for layout, *pair in zip(chain[1:], folders, folders[1:], strict=False):
        found = on_ranks(tmp_path, LAYOUTS[layout][0], ranks.load_and_save, layout, family, roles, tuple(pair))[0]
        for role, state in saved.items():
            assert found[role].keys() == state.keys()
            for name, value in state.items():
                assert np.array_equal(found[role][name], value), (layout, role, name)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *(("hsdp2x2", "llama"), ("dp2tp2", "llama"), ("pp2ep2", "qwen3_moe"), ("ep2tp2", "deepseek_v3")),
        *[("dp2cp2", "llama"), ("pp2dp2", "llama"), ("pp2vpp2", "llama_deep")] * RUNS_ALL,
        *[("dp2ep2", "mixtral"), ("ep2tp2", "qwen3_moe")] * RUNS_ALL,
        *[("pp2vpp2dp2", "gemma3_deep"), ("pp2vpp2tp2", "qwen3_moe_deep"), ("pp3vpp2", "llama_deeper")] * RUNS_ALL,
    ],
)
def test_an_exported_folder_and_the_stream_to_engines_hold_the_trained_weights(
    layout: str, family: str, tmp_path: Path
):
    parts = on_ranks(tmp_path, LAYOUTS[layout][0], ranks.export, layout, family, tmp_path / "model")
    stream = {name: value for part in parts for name, value in part.items()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    weights = dict(model.named_parameters()) | buffers
    assert stream.keys() == weights.keys()
    assert all(np.array_equal(stream[name], weight.detach().numpy()) for name, weight in weights.items())

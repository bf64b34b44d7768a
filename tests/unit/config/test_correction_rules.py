"""What `algorithm.correction` can't be combined with."""

from typing import Any

import pytest

from rlpack.config.correction_rules import correction_problems
from rlpack.config.schema import Algorithm, Rollout, Trainer
from rlpack.config.sections.correction_settings import Correction
from rlpack.config.warnings import config_warnings
from tests.builders import tiny_config


def problems(rollout: dict[str, Any] | None = None, **correction: Any) -> list[str]:
    algorithm = Algorithm(correction=Correction(**correction))
    return list(correction_problems(tiny_config(algorithm=algorithm, rollout=Rollout(**(rollout or {})))))


def test_the_default_and_every_mode_alone_are_fine():
    assert problems() == []
    assert problems(weights="token") == problems(weights="sequence", lower=0.5) == problems(bypass=True) == []
    assert problems(bypass=True, reject={"seq_mean_k1": 1.1}, stop_above={"k3": 1.0}) == []
    assert problems(reject={"seq_mean_k1": [0.99, 1.01], "token_k3": 0.5}) == []
    assert problems(weights="token", warn_above={"weights_bounded": 0.1}) == []
    assert problems(reject={"token_k3": 0.5}, stop_above={"rejected_tokens": 100.0}) == []
    assert problems(bypass=True, warn_below={"effective_share": 0.9}, stop_below={"effective_share": 0.5}) == []


@pytest.mark.parametrize("rollout", [{"top_k": 5}, {"top_p": 0.9}])
def test_filtered_sampling_is_refused_with_the_reason(rollout: dict[str, Any]):
    assert problems(rollout) == []
    for correction in ({"weights": "token"}, {"reject": {"token_k2": 1.0}}, {"bypass": True}):
        (problem,) = problems(rollout, **correction)
        assert "would bias every ratio; set rollout.top_k=0 and rollout.top_p=1" in problem


def test_processors_of_logits_that_the_trainer_does_not_have_are_refused_with_the_reason():
    processors = {"engine": "vllm", "vllm": {"logits_processors": ["my_package:Processor"]}}
    assert problems(processors) == []
    (problem,) = problems(processors, weights="token")
    assert "rollout.vllm.logits_processors changes the sampler's only, which would bias every ratio" in problem


@pytest.mark.parametrize(
    ("correction", "text"),
    [
        (
            {"weights": "token", "lower": 1.2},
            "correction.lower (1.2) and algorithm.correction.upper (2) exclude the ratio 1",
        ),
        ({"reject": {"seq_mean_k1": [1.0002, 1.1]}}, "reject.seq_mean_k1 is [1.0002, 1.1], which excludes the ratio 1"),
        ({"weights": "token", "lower": 3.0}, "correction.lower (3) exceeds algorithm.correction.upper (2)"),
        ({"bypass": True, "weights": "token"}, "ratio already is the importance weight, and algorithm"),
        ({"reject": {"seq_k1": 1.0}}, "has the criterion 'seq_k1'; choose from token_k1, token_k2"),
        ({"reject": {"token_k1": [2.0, 1.0]}}, "reject.token_k1 is [2.0, 1.0]; its lower bound 2 exceeds the upper"),
        ({"reject": {"token_k2": [0.1, 1.0]}}, "reject.token_k2 is [0.1, 1.0]; it takes one number"),
        ({"stop_above": {"k4": 1.0}}, "stop_above has the metric 'k4'; choose from kl, k3, chi2, gap, largest_gap"),
        ({"warn_above": {"lag_1/kl": 1.0}}, "warn_above has the metric 'lag_1/kl'; choose from kl"),
        ({"stop_above": {"/kl": 1.0}}, "stop_above has the metric '/kl'; choose from kl"),
        (
            {"warn_above": {"weights_bounded": 0.1}},
            "'weights_bounded', which needs algorithm.correction.weights; set it",
        ),
        ({"stop_above": {"rejected_rows": 9.0}}, "'rejected_rows', which needs algorithm.correction.reject; set it"),
        ({"warn_above": {"kl": 0.0}}, "warn_above.kl is 0; it has to be finite and above 0"),
        ({"stop_below": {"k3": 0.5}}, "stop_below has the metric 'k3'; choose from effective_share"),
        ({"stop_above": {"effective_share": 0.5}}, "stop_above has the metric 'effective_share'; choose from kl, k3"),
        ({"warn_below": {"effective_share": 1.5}}, "effective_share is 1.5; it has to be above 0 and at most 1"),
        ({"reject": {"seq_sum_k3": 0.0}}, "reject.seq_sum_k3 is 0.0; it takes one or two positive numbers"),
    ],
)
def test_values_that_make_no_correction_are_named(correction: dict[str, Any], text: str):
    (problem,) = problems(**correction)
    assert text in problem


def test_limits_on_lags_reach_as_far_as_late_groups_do():
    trainer = Trainer(lead=2, late_groups={"window": 3})  # pyright: ignore[reportArgumentType]
    limits = {f"lag_{lag}/kl": 1.0 for lag in (0, 4, 5, "01")}
    algorithm = Algorithm(correction=Correction(weights="token", stop_above=limits))
    beyond, unknown = correction_problems(tiny_config(algorithm=algorithm, trainer=trainer))
    assert "has the metric 'lag_5/kl'" in beyond
    assert "has the metric 'lag_01/kl'" in unknown
    assert beyond.endswith("each also as lag_0/… to lag_4/…")


def test_bypass_needs_the_kl_term_in_the_loss():
    algorithm = Algorithm(correction=Correction(bypass=True), kl_coef=0.1, kl_placement="reward")
    (problem,) = correction_problems(tiny_config(algorithm=algorithm))
    assert "skips the old log-probs, which algorithm.kl_placement=reward needs" in problem


@pytest.mark.parametrize(
    ("recipe", "correction", "text"),
    [
        ("grpo", {"lower": 0.5}, "correction.lower is 0.5 but unused: it applies to importance weights; set"),
        ("grpo", {"normalize": True}, "correction.normalize is true but unused: it applies to importance weights"),
        ("grpo", {"upper": 3.0, "reject": {"token_k3": 1.0}}, "correction.upper is 3 but unused"),
        ("sft", {"weights": "token"}, "algorithm.correction.* is set but unused: recipe=sft samples no responses"),
    ],
)
def test_settings_without_effect_are_named(recipe: str, correction: dict[str, Any], text: str):
    algorithm = Algorithm(correction=Correction(**correction))
    (warning,) = config_warnings(tiny_config(recipe, algorithm=algorithm))
    assert text in warning


@pytest.mark.parametrize(
    ("trainer", "correction", "rollout", "text"),
    [
        ({}, {}, {}, None),
        ({"updates_per_batch": 2}, {}, {}, None),
        ({"lead": 0}, {}, {}, None),
        ({}, {"warn_above": {"k3": 0.1}}, {}, None),
        (
            {"updates_per_batch": 2},
            {"bypass": True},
            {},
            "algorithm.correction.bypass=true uses the sampler's log-probs",
        ),
        ({"updates_per_batch": 2}, {}, {"top_k": 5}, "rollout.top_k or rollout.top_p filters what is sampled"),
    ],
)
def test_a_run_with_a_lead_whose_staleness_nothing_measures_says_so(
    trainer: dict[str, Any], correction: dict[str, Any], rollout: dict[str, Any], text: str | None
):
    sizes = {"lead": 1, "prompts_per_step": 2, "group_size": 4, "mini_batch_size": None}
    config = tiny_config(
        trainer=Trainer(**(sizes | trainer)),
        algorithm=Algorithm(correction=Correction(**correction)),
        rollout=Rollout(**rollout),
    )
    found = [warning for warning in config_warnings(config) if "mismatch/*" in warning]
    assert len(found) == (text is not None)
    assert text is None or text in found[0]


def test_bounds_of_weights_have_an_effect():
    algorithm = Algorithm(correction=Correction(weights="sequence", lower=0.5, upper=3.0))
    assert config_warnings(tiny_config(algorithm=algorithm)) == []

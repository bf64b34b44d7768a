"""Rules of off-policy correction (`algorithm.correction`)."""

import math
from collections.abc import Iterator

from rlpack.config.recipes import recipe_of
from rlpack.config.schema import Config
from rlpack.config.sections.correction_settings import (
    CRITERIA,
    LOWER_LIMITED,
    MISMATCHES,
    OF_KEYS,
    Correction,
    bounds_of,
)

_KEY = "algorithm.correction"
_EQUAL = "the ratio 1 of equal policies, so no token of the newest policy would be trained on; choose a range with 1"


def correction_problems(config: Config) -> Iterator[str]:
    """Yield why responses can't be corrected as configured."""
    correction, rollout = config.algorithm.correction, config.rollout
    if not recipe_of(config).generates or not (correction.measures or correction.bypass):
        return
    if correction.bypass and correction.weights != "none":
        yield (
            f"{_KEY}.bypass takes the sampler's log-probs as the old ones, so the policy loss's ratio already is the "
            f"importance weight, and {_KEY}.weights={correction.weights} would apply it twice; set "
            f"{_KEY}.weights=none or {_KEY}.bypass=false"
        )
    if correction.skips_old_logprobs and config.algorithm.kl_placement == "reward":
        yield (
            f"{_KEY}.bypass skips the old log-probs, which algorithm.kl_placement=reward needs; set "
            f"{_KEY}.bypass=false or algorithm.kl_placement=loss"
        )
    if rollout.top_k > 0 or rollout.top_p < 1:
        yield (
            f"{_KEY} compares probabilities of the sampler and the trainer, but with rollout.top_k={rollout.top_k} and "
            f"rollout.top_p={rollout.top_p:g} the sampler's are those of a part of the vocabulary, which would bias "
            f"every ratio; set rollout.top_k=0 and rollout.top_p=1, or leave {_KEY} out"
        )
    if rollout.vllm.get("logits_processors"):
        yield (
            f"{_KEY} compares probabilities of the sampler and the trainer, but rollout.vllm.logits_processors changes "
            f"the sampler's only, which would bias every ratio; remove it, or leave {_KEY} out"
        )
    yield from _bound_problems(correction)
    yield from _limit_problems(config)


def _bound_problems(correction: Correction) -> Iterator[str]:
    """Yield problems of the bounds of weights and criteria."""
    lower, upper = correction.lower, correction.upper
    if lower is not None and lower > upper:
        yield f"{_KEY}.lower ({lower:g}) exceeds {_KEY}.upper ({upper:g}); lower it"
    elif correction.weights != "none" and lower is not None and not lower <= 1 <= upper:
        yield f"{_KEY}.lower ({lower:g}) and {_KEY}.upper ({upper:g}) exclude {_EQUAL}"
    for name, value in correction.reject.items():
        if name not in CRITERIA:
            yield f"{_KEY}.reject has the criterion {name!r}; choose from {', '.join(CRITERIA)}"
            continue
        try:
            least, most = bounds_of(name, value)
        except ValueError as error:
            yield f"{_KEY}.reject.{name} is {value}; {error}"
            continue
        if name.endswith("k1") and not least <= 1 <= most:
            yield f"{_KEY}.reject.{name} is {value}, which excludes {_EQUAL}"


def _gives_metrics(config: Config, key: str) -> bool:
    """Return whether `weights` or `reject` is on."""
    correction = config.algorithm.correction
    return bool(correction.reject) if key == "reject" else correction.weights != "none"


def _limit_problems(config: Config) -> Iterator[str]:
    """Yield limits on metrics that a run doesn't have."""
    correction = config.algorithm.correction
    oldest = config.trainer.max_lag if config.trainer.lead else None  # without a lead, no lags are measured
    prefixes = {"", *(f"lag_{lag}/" for lag in range(0 if oldest is None else oldest + 1))}
    for key, limits in correction.limits:
        is_lower = key.endswith("below")
        known = LOWER_LIMITED if is_lower else (*MISMATCHES, *OF_KEYS)
        for name, limit in limits.items():
            lag, slash, metric = name.rpartition("/")
            missing = OF_KEYS.get(metric, "")
            if lag + slash not in prefixes or metric not in known:
                lags = f", each also as lag_0/… to lag_{oldest}/…" if oldest is not None else ""
                yield f"{_KEY}.{key} has the metric {name!r}; choose from {', '.join(known)}{lags}"
            elif missing and not _gives_metrics(config, missing):
                yield f"{_KEY}.{key} has the metric {name!r}, which needs {_KEY}.{missing}; set it, or remove the limit"
            elif is_lower and not 0 < limit <= 1:
                yield f"{_KEY}.{key}.{name} is {limit:g}; it has to be above 0 and at most 1"
            elif not math.isfinite(limit) or limit <= 0:
                yield f"{_KEY}.{key}.{name} is {limit:g}; it has to be finite and above 0"

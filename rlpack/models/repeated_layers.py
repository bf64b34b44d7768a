"""Simulate a model of many equal layers from two shorter ones, exactly.

Most layers of a deep model repeat: they are all equal, or a pattern of a few layers recurs, such as five with a sliding
window and one without. Whatever a pass holds at a given point of a given layer then grows linearly with the number of
repetitions. This holds for each phase of a simulated pass (`rlpack.models.live_bytes`), but not for its peak: with more
layers, another phase may have the largest one. So each phase is extrapolated, and the peak is taken afterwards.

The shorter models keep the first and the last layers, which have other neighbors than those in the middle, and next to
them a whole pattern of ordinary ones. The phases between these two patterns lie on lines, so none is higher than both
of its ends.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlpack.models.live_bytes import Peak, Use
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.pipeline_parallel import PassOn
from rlpack.models.stage_wiring import LAYERS

# Layers on either side that have other neighbors: FSDP2 gathers the weights of the next layer but one ahead.
_MARGIN = 2
_LONGEST_PATTERN = 16
# Two shorter models take time, too, so they must have this share of the layers at most.
_MOST_SIMULATED = 0.75


@dataclass(frozen=True)
class Repetition:
    """A stack of layers in which a pattern recurs.

    Attributes:
        front: layers before those that are left out, the first repetitions included.
        period: layers of the pattern.
        times: repetitions that are left out.
    """

    front: int
    period: int
    times: int

    def left_out(self, layers: Sequence[nn.Module], kept: int) -> Sequence[nn.Module]:
        """Return the layers that are left out of a shorter model, which keeps `kept` of these repetitions."""
        return layers[self.front + kept * self.period : self.front + self.times * self.period]


def own_layers(model: PackedModel) -> list[nn.Module]:
    """Return the decoder layers of this rank, first to last; none if the model has no list of that name."""
    stack = dict(language_model(model.model).named_children()).get(LAYERS)
    if not isinstance(stack, nn.ModuleList):
        return []
    return [layer for layer in stack if not isinstance(layer, PassOn)]


def find_repetition(layers: Sequence[nn.Module]) -> Repetition | None:
    """Return the repetition whose shorter models have the fewest layers; None if they don't save enough."""
    traits = [_traits(layer) for layer in layers]
    found: list[tuple[int, Repetition]] = []
    for period in range(1, min(_LONGEST_PATTERN, len(layers) // 2) + 1):
        margin = _MARGIN + period
        for first, last in _runs(traits, period):
            times = (last - first - 2 * margin) // period
            simulated = 2 * (len(layers) - times * period) + period
            if times > 1 and simulated <= _MOST_SIMULATED * len(layers):
                found.append((simulated, Repetition(first + margin, period, times)))
    return min(found, key=lambda one: one[0], default=(0, None))[1]


def _runs(traits: Sequence[Hashable], period: int) -> list[tuple[int, int]]:
    """Return the ranges of layers in which each equals the one a period before it, as first and last + 1."""
    runs, first = [], 0
    for index in range(period, len(traits) + 1):
        if index == len(traits) or traits[index] != traits[index - period]:
            runs.append((first, index))
            first = index - period + 1
    return runs


def _traits(layer: nn.Module) -> Hashable:
    """Return what distinguishes layers: their modules with all plain settings but an index, and their weights."""
    modules = tuple((name, type(module).__name__, _settings(module)) for name, module in layer.named_modules())
    weights = tuple((name, tuple(weight.shape), weight.dtype, weight.requires_grad) for name, weight in _tensors(layer))
    return modules, weights


def _settings(module: nn.Module) -> Hashable:
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
    return tuple(sorted((name, repr(value)) for name, value in plain.items() if name not in {"layer_idx", "layer_id"}))


def _tensors(layer: nn.Module) -> list[tuple[str, Any]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def extrapolate(
    short: Mapping[Hashable, Peak], longer: Mapping[Hashable, Peak], repetition: Repetition
) -> dict[Hashable, Peak] | None:
    """Return the phases of a model with all layers, without those of layers in the middle; None if they don't match.

    Args:
        short: phases of the model without all repetitions that are left out.
        longer: phases of the model with one of them.
        repetition: what is left out.
    """
    matched = {_shortened(key, repetition): peak for key, peak in longer.items() if not _is_extra(key, repetition)}
    if matched.keys() != short.keys():
        return None
    return {key: _extrapolated(peak, matched[key], repetition.times) for key, peak in short.items()}


def _is_extra(key: Hashable, repetition: Repetition) -> bool:
    """Return whether a phase belongs to a layer that only the longer model has."""
    return isinstance(key, tuple) and len(key) == 3 and 0 <= key[2] - repetition.front < repetition.period


def _shortened(key: Hashable, repetition: Repetition) -> Hashable:
    """Return the name of a phase of the longer model in the shorter one."""
    if isinstance(key, tuple) and len(key) == 3 and key[2] >= repetition.front:
        return *key[:2], key[2] - repetition.period
    return key


def _extrapolated(short: Peak, longer: Peak, times: int) -> Peak:
    return Peak(
        _added(short.at_peak, longer.at_peak, times),
        _added(short.most, longer.most, times),
        short.transient + times * (longer.transient - short.transient),
    )


def _added(short: Counter[Use], longer: Counter[Use], times: int) -> Counter[Use]:
    return Counter({use: short[use] + times * (longer[use] - short[use]) for use in short.keys() | longer.keys()})

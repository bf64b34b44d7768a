"""Parts of weights that are found without values are those that the conversion gives with values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlpack.models.weight_pieces import PiecePlan
from rlpack.models.weight_views import entry_runs, find_views

Convert = Callable[[Tensor], dict[str, Tensor]]


def experts(weight: Tensor) -> dict[str, Tensor]:
    """As transformers splits stacked experts into gate and up projections of each."""
    chunks = [chunk.contiguous() for chunk in weight.chunk(2, 1)]
    return {
        f"{number}.{name}": part.squeeze(0)
        for name, chunk in zip(("gate", "up"), chunks, strict=True)
        for number, part in enumerate(chunk.chunk(weight.shape[0], 0))
    }


VIEWS: dict[str, Convert] = {
    "itself": lambda weight: {"a": weight},
    "experts": experts,
    "transposed": lambda weight: {"a": weight.transpose(1, 2).contiguous()},
    "split": lambda weight: dict(zip("abc", weight.split([1, 2, 3], 0), strict=True)),
    "new axis": lambda weight: {"a": weight.unsqueeze(0)},
    "two of three axes": lambda weight: {"a": weight[1, :, 2], "b": weight[:, 3].t()},
    "copy": lambda weight: {"a": weight.clone()},
}
OTHERS: dict[str, Convert] = {
    "computed": lambda weight: {"a": 2 * weight},
    "computed in place": lambda weight: {"a": weight.clone().mul_(2)},
    "joined": lambda weight: {"a": torch.cat([weight, weight])},
    "every second row": lambda weight: {"a": weight[::2]},
    "flat": lambda weight: {"a": weight.flatten()},
    "heads permuted": lambda weight: {"a": weight.view(2, 3, 4, 6).transpose(0, 1).reshape(6, 4, 6)},
    "turned": lambda weight: {"a": weight.flip(0)},
    "another dtype": lambda weight: {"a": weight.bfloat16()},
    "one a view, one not": lambda weight: {"a": weight, "b": weight + 1},
    "diagonal": lambda weight: {"a": weight[:4].diagonal()},
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("cuts", [(), ((0, 4),), ((1, 2), (0, 2))])
@pytest.mark.parametrize("piece_bytes", [40, 200])
def test_pieces_of_a_weight_fill_the_tensors_of_a_conversion(
    name: str, cuts: tuple[tuple[int, int], ...], piece_bytes: int
):
    weight = torch.randn(6, 4, 6)
    views = find_views(torch.empty(weight.shape, device="meta"), VIEWS[name])
    assert views is not None
    expected = VIEWS[name](weight)
    assert {target: view.shape for target, view in views.items()} == {
        target: tuple(tensor.shape) for target, tensor in expected.items()
    }
    found = {target: torch.full(view.shape, torch.nan) for target, view in views.items()}
    for place in PiecePlan.of(weight.shape, 4, cuts, piece_bytes).places:
        for target, view in views.items():
            if (cut := view.cut(place, weight[place])) is not None:
                begins, length = entry_runs(view.shape, cut[0])
                entries = torch.from_numpy(begins)[:, None] + torch.arange(length)
                found[target].view(-1)[entries] = cut[1].reshape(len(begins), -1)
                assert torch.equal(found[target][cut[0]], cut[1])
    for target, tensor in expected.items():
        assert torch.equal(found[target], tensor), target


@pytest.mark.parametrize("name", OTHERS)
def test_other_conversions_have_no_views(name: str):
    assert find_views(torch.empty(6, 4, 6, device="meta"), OTHERS[name]) is None


def test_a_tensor_without_axes_is_a_view_of_itself():
    views = find_views(torch.empty((), device="meta"), lambda weight: {"a": weight})
    assert views is not None
    cut = views["a"].cut((), torch.tensor(3.0))
    assert cut is not None
    place, values = cut
    assert place == ()
    assert torch.equal(values, torch.tensor(3.0))

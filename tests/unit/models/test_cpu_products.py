"""Linear layers by oneDNN: values and gradients are those of exact arithmetic, and rows don't depend on each other."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from rlpack.models import cpu_products
from rlpack.models.cpu_products import FasterLinear, matmul_transposed, use_faster_products

pytestmark = pytest.mark.skipif(not cpu_products._can_be_called(), reason="this build of PyTorch lacks the operator")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN on whatever machine the tests run."""
    monkeypatch.setattr(cpu_products, "is_faster", lambda: True)


@pytest.mark.parametrize("shape", [(1,), (2, 7), (64,), (1, 300), (2, 70), (3, 1, 100), (1100,), (3, 900), (9000,)])
@pytest.mark.parametrize(("outputs", "bias"), [(33, True), (33, False), (80, False)])
def test_values_and_gradients_are_those_of_fp64(shape: tuple[int, ...], outputs: int, bias: bool):
    torch.manual_seed(0)
    layer = use_faster_products(nn.Linear(48, outputs, bias=bias))
    exact = copy.deepcopy(layer).double()
    assert type(layer) is FasterLinear
    given = torch.randn(*shape, 48)
    inputs, precise = given.clone().requires_grad_(), given.double().requires_grad_()
    weights = torch.randn(*shape, outputs)
    layer(inputs).mul(weights).sum().backward()
    nn.functional.linear(precise, exact.weight, exact.bias).mul(weights).sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(layer(given).double(), exact(given.double()), rtol=1e-5, atol=1e-5)
    own, precisely = (tuple(model.parameters()) for model in (layer, exact))
    pairs = [(inputs.grad, precise.grad), *((one.grad, other.grad) for one, other in zip(own, precisely, strict=True))]
    for found, expected in pairs:
        assert found is not None
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * given.numel() ** 0.5 / 48**0.5)


def test_a_row_has_the_same_bits_among_any_number_of_others():
    """Packed rows are compared bit for bit with rows that run alone."""
    torch.manual_seed(0)
    layer, rows = use_faster_products(nn.Linear(96, 80)), torch.randn(1000, 96)
    whole = layer(rows)
    for count in (64, 65, 128, 333, 640):
        assert torch.equal(layer(rows[:count]), whole[:count])


def test_frozen_weights_and_inputs_get_no_gradient():
    layer = use_faster_products(nn.Linear(8, 4)).requires_grad_(False)
    inputs = torch.randn(3, 8, requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None
    assert layer.weight.grad is layer.bias.grad is None
    layer.requires_grad_(True)(inputs.detach()).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_empty_inputs_are_pytorchs_own(dtype: torch.dtype):
    layer = use_faster_products(nn.Linear(8, 4)).to(dtype)
    inputs = torch.randn(3, 8, dtype=dtype)
    assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
    empty = use_faster_products(nn.Linear(8, 4))(torch.zeros(0, 8))
    assert empty.shape == (0, 4)
    empty.sum().backward()


@pytest.mark.parametrize("rows", [64, 100])
def test_a_result_can_be_changed_in_place(rows: int):
    """Llama 4 does."""
    layer = use_faster_products(nn.Linear(8, 4))
    result = layer(torch.randn(rows, 8))
    result.mul_(2.0)
    result.sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [2.0 * rows] * 4


def test_subclasses_keep_their_own_forward():
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = use_faster_products(nn.Sequential(Doubled(4, 4), nn.Linear(4, 4)))
    assert [type(layer) for layer in model] == [Doubled, FasterLinear]


def test_products_of_any_layout_are_those_of_fp64():
    torch.manual_seed(0)
    left, right = torch.randn(30, 20), torch.randn(20, 50)
    for one, other in ((left, right.t()), (left, right.t().contiguous()), (left[::2], right.t()[:7])):
        exact = one.double() @ other.double().t()
        torch.testing.assert_close(matmul_transposed(one, other).double(), exact, rtol=1e-4, atol=1e-5)
    assert matmul_transposed(left[:0], right.t()).shape == (0, 50)


def test_gradients_are_differentiated_again_as_in_fp64():
    """A gradient penalty, also where the first gradient depends on the weights alone."""
    torch.manual_seed(0)
    layer = use_faster_products(nn.Linear(6, 5))
    exact = copy.deepcopy(layer).double()
    given = torch.randn(3, 6)
    for power in (1, 2):
        for model, linear in (
            (layer, layer),
            (exact, lambda rows: nn.functional.linear(rows, exact.weight, exact.bias)),
        ):
            model.zero_grad()
            rows = given.to(model.weight.dtype).requires_grad_()
            (slope,) = torch.autograd.grad(linear(rows).pow(power).sum(), rows, create_graph=True)
            slope.pow(2).sum().backward()
        assert layer.weight.grad is not None
        assert exact.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-4)


_MANY_SHAPES = """
import torch
from torch import nn
from rlpack.models import cpu_products

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096

cpu_products._can_be_called()
cpu_products.is_faster = lambda: True
layer = cpu_products.use_faster_products(nn.Linear(256, 512))
layer(torch.randn(899, 256)).sum().backward()
before = resident()
for count in range(2, 500):
    layer(torch.randn(count, 256)).sum().backward()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_when_every_batch_has_another_number_of_rows():
    variables = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run(
        [sys.executable, "-c", _MANY_SHAPES], env=variables, capture_output=True, text=True, timeout=300, check=True
    )
    assert int(done.stdout) < 300 * 2**20

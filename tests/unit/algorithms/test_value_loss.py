import pytest
import torch

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.value_loss import clipped_value_loss


def test_without_a_bound_it_is_half_the_squared_error() -> None:
    values, returns = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([3.0, 0.5])
    result = clipped_value_loss(values, torch.zeros(2), returns)
    assert result.token_losses.tolist() == [2.0, 3.125]
    result.token_losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [-2.0, -2.5]
    assert not result.clipped.any()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "held"),
    [
        (0.1, 0.0, 3.0, 0.5 * 2.9**2, -2.9, False),  # within the bound
        (1.0, 0.0, 3.0, 0.5 * 2.8**2, 0.0, True),  # further towards its return than the bound lets it go
        (-1.0, 0.0, 3.0, 0.5 * 4.0**2, -4.0, False),  # further away: the way back is free
        (4.0, 0.0, 3.0, 0.5 * 2.8**2, 0.0, True),  # past it, and the bounded value is further off
    ],
)
def test_a_value_beyond_the_bound_gets_no_gradient_towards_its_return(
    value: float, old: float, target: float, loss: float, gradient: float, held: bool
) -> None:
    values = torch.tensor([value], requires_grad=True)
    result = clipped_value_loss(values, torch.tensor([old]), torch.tensor([target]), clip=0.2)
    assert result.token_losses.item() == pytest.approx(loss)
    result.token_losses.sum().backward()
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient)
    assert result.clipped.item() is held


def test_columns_of_other_shapes_and_a_bound_of_nothing_are_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"\[2\], \[1\] and \[2\]"):
        clipped_value_loss(torch.zeros(2), torch.zeros(1), torch.zeros(2))
    with pytest.raises(AlgorithmError, match=r"set critic.value_clip above 0"):
        clipped_value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), clip=0.0)


def test_a_value_within_the_range_never_counts_as_clipped_by_rounding():
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 10_000, generator=generator)
    values = old + 0.19 * (2 * torch.rand(10_000, generator=generator) - 1)
    assert not clipped_value_loss(values, old, returns, clip=0.2).clipped.any()

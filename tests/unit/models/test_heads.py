"""Outputs of scalar heads against the wrapped model alone, one row at a time."""

import pytest
import torch
from torch import Tensor

from rlpack.models.checks import check_isolation
from rlpack.models.errors import IsolationError
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.inputs import pack_rows
from tests.unit.models.tiny import KINDS, VOCABULARY, pad_rows, tiny_model, tiny_rows

TOLERANCE = {"gemma2": 5e-6, "gemma3": 5e-6}
ROWS = tiny_rows([9, 1, 13, 0, 6])


def head_of(model: torch.nn.Module) -> torch.nn.Linear:
    width = model.config.get_text_config().hidden_size
    head = torch.nn.Linear(width, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    head.weight.data = torch.randn(1, width, dtype=torch.float64, generator=generator)
    head.bias.data.fill_(0.3)
    return head


def alone(model: torch.nn.Module, head: torch.nn.Linear, row: Tensor) -> Tensor:
    return head(model(input_ids=row[None], use_cache=False).last_hidden_state)[0, :, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_scalars_are_those_of_each_row_alone_read_before_or_at_the_token(kind: str, layout: str):
    model = tiny_model(kind).base_model
    reference = tiny_model(kind, implementation="eager" if kind == "gemma2" else "sdpa").base_model
    critic, head = ScalarHeadModel(model, head_of(model)), head_of(reference)
    inputs = pack_rows(ROWS) if layout == "packed" else pad_rows(ROWS, width=15)
    rows = [alone(reference, head, row) if len(row) else torch.zeros(0) for row in ROWS]
    tolerance = max(TOLERANCE.get(kind, 0.0), 1e-5)  # a column is fp32
    assert torch.allclose(critic(inputs, before_token=False).double(), torch.cat(rows).double(), rtol=0, atol=tolerance)
    shifted = torch.cat([torch.cat([row.new_zeros(1), row])[:-1] for row in rows if len(row)])
    assert torch.allclose(critic(inputs, before_token=True).double(), shifted.double(), rtol=0, atol=tolerance)


def test_a_new_critic_predicts_zero_and_learns():
    critic = ScalarHeadModel(tiny_model("qwen2").base_model)
    numbers = critic(pack_rows(ROWS), before_token=True)
    assert numbers.eq(0).all()
    (numbers - 1).square().sum().backward()
    assert critic.head.weight.grad is not None
    assert critic.head.weight.grad.abs().max() > 0


def test_scalars_of_a_bf16_model_are_computed_in_fp32():
    model = tiny_model("qwen2", dtype=torch.bfloat16, initializer_range=0.02).base_model
    head = head_of(model).to(torch.bfloat16)
    head.bias.data.fill_(8.0)  # bf16 has only every sixteenth from 8 to 16
    critic, inputs = ScalarHeadModel(model, head), pack_rows(ROWS)
    assert critic.head is head  # a classifier's weights are loaded after its head was taken
    hidden = critic.hidden_states(inputs, None)[inputs.slots]
    scalars = critic(inputs, before_token=False)
    assert scalars.dtype == torch.float32
    expected = hidden.double() @ head.weight.double()[0] + 8.0
    assert torch.allclose(scalars.double(), expected, rtol=0, atol=1e-5)
    scalars.sum().backward()
    assert critic.head.weight.grad is not None
    assert torch.allclose(critic.head.weight.grad[0].double(), hidden.double().sum(0), rtol=1e-2, atol=1e-2)


def test_the_isolation_check_sees_a_leak_behind_a_new_head(monkeypatch):
    critic = ScalarHeadModel(tiny_model("qwen2", dtype=torch.float32, initializer_range=0.02).base_model)
    check_isolation(critic, "cpu", VOCABULARY)
    hidden = critic.hidden_states
    monkeypatch.setattr(critic, "hidden_states", lambda *given: hidden(*given) + 1e-3 * hidden(*given).mean())
    with pytest.raises(IsolationError, match="rows see each other"):
        check_isolation(critic, "cpu", VOCABULARY)


@pytest.mark.parametrize("width", [16, 32])
def test_a_model_that_projects_its_hidden_states_gets_a_head_of_their_width(width):
    settings = {"word_embed_proj_dim": width, "ffn_dim": 48, "max_position_embeddings": 64}
    model = tiny_model("opt", dtype=torch.float32, **settings).base_model
    critic = ScalarHeadModel(model)
    assert critic.head.in_features == model(input_ids=ROWS[0][None]).last_hidden_state.shape[-1] == width
    assert critic(pack_rows(ROWS), before_token=True).eq(0).all()

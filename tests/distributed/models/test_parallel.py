from pathlib import Path

import pytest
import torch

from rlpack.models.errors import ModelError
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import clip_grad_norm, shard_model
from tests.distributed.models import ranks
from tests.distributed.models.ranks import MICROBATCHES, ROWS, Step, canary, load_and_save, new_policy
from tests.distributed.processes import on_ranks
from tests.whole_weights import full_state_dict, load_full_state_dict


def one_process(dtype: torch.dtype = torch.float64, max_norm: float = 1e9) -> Step:
    """Take the step of all ranks' microbatches in one process, without any sharding."""
    return ranks.optimizer_step(new_policy(dtype), [rows for rank in MICROBATCHES for rows in rank], max_norm=max_norm)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("small_bytes", [0, 2**20])  # layer by layer, as a whole
def test_two_ranks_take_the_step_of_one_process(tmp_path: Path, reshard: bool, checkpoint: bool, small_bytes: int):
    expected = one_process(max_norm=0.5)
    assert expected.norm > 0.5
    for found in on_ranks(tmp_path, 2, ranks.sharded_step, "fp32", reshard, checkpoint, 0.5, small_bytes):
        assert found.norm == pytest.approx(expected.norm, rel=1e-10)
        assert list(found.weights) == list(expected.weights)
        for name, gradient in expected.gradients.items():
            assert (found.gradients[name] - gradient).norm() <= 1e-10 * gradient.norm(), name
            assert torch.allclose(found.weights[name], expected.weights[name], rtol=0, atol=1e-12), name
        # The weights that the optimizer changed are those that the next forward uses.
        assert torch.allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-10)


def test_bfloat16_keeps_fp32_weights_and_sums_and_stays_close(tmp_path: Path):
    expected = one_process(torch.float32)
    for found in on_ranks(tmp_path, 2, ranks.sharded_step, "bf16", True, False, 1e9):
        assert {weight.dtype for weight in found.weights.values()} == {torch.float32}
        assert found.norm == pytest.approx(expected.norm, rel=0.1)


def test_loaded_weights_arrive_on_every_rank_and_are_used(tmp_path: Path):
    for arrived, used, message in on_ranks(tmp_path, 2, load_and_save):
        assert (arrived, used) == (True, True)
        assert "model.norm.weight has shape [3], the model's [32]" in message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sharded_policy_passes_the_isolation_check(tmp_path: Path, precision: str):
    assert on_ranks(tmp_path, 2, canary, precision) == [True, True]


def test_weights_of_an_unsharded_policy_round_trip_with_tied_ones_once():
    policy, other = new_policy(), new_policy()
    state = {name: 2 * tensor for name, tensor in full_state_dict(policy).items()}
    assert "lm_head.weight" not in state
    load_full_state_dict(other, state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    assert all(torch.equal(tensor, state[name]) for name, tensor in full_state_dict(other).items())


def test_states_of_another_model_are_named():
    policy = new_policy()
    state = full_state_dict(policy)
    with pytest.raises(ModelError, match=r"1 weights are missing, the first is model\.norm\.weight"):
        load_full_state_dict(policy, {name: state[name] for name in state if name != "model.norm.weight"})
    with pytest.raises(ModelError, match="not the model's, the first is surprise"):
        load_full_state_dict(policy, state | {"surprise": torch.ones(1)})


def test_clipping_returns_the_norm_before_and_scales_down_to_the_bound():
    policy = new_policy()
    policy(pack_rows(ROWS)).logprobs.sum().backward()
    before = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).norm().item()
    assert clip_grad_norm(policy, 0.25) == pytest.approx(before)
    assert clip_grad_norm(policy, 1e9) == pytest.approx(0.25, rel=1e-4)


def test_an_unknown_precision_is_named():
    with pytest.raises(ModelError, match=r"precision is 'fp8'; choose one of fp32, bf16"):
        shard_model(new_policy(), None, precision="fp8")

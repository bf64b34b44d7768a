"""Compiled layers: the same log-probs and gradients, and code for all lengths."""

import logging
import os

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.figures import one_rank
from rlpack.models.checks import check_isolation
from rlpack.models.compiled_graphs import CompiledGraphs
from rlpack.models.compiled_layers import compile_layers
from rlpack.models.errors import ModelError
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import reshard, shard_model
from rlpack.models.policy import Policy
from tests.unit.models.tiny import VOCABULARY, tiny_model, tiny_rows
from tests.whole_weights import full_state_dict

# The compiler's own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")
# The compiler of this backend needs no C++ compiler; the graphs are those of the default one.
BACKEND = "aot_eager"
# Compiling takes long: `make test-long` runs everything.
long = pytest.mark.skipif(not os.environ.get("RLPACK_COMPILED"), reason="runs in `make test-long`")
LENGTHS = ([9, 1, 4], [1])


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    trace = logging.getLogger("torch.__trace")  # pytest would format thousands of records
    level = trace.level
    trace.setLevel(logging.CRITICAL)
    yield
    trace.setLevel(level)
    torch._dynamo.reset()


def policy_of(checkpointing: str = "none", kind: str = "llama") -> Policy:
    policy = Policy(tiny_model(kind, dtype=torch.float32, num_hidden_layers=1))
    policy.checkpoint_activations(checkpointing)  # pyright: ignore[reportArgumentType]
    policy.train()
    return policy


def scores_and_gradients(policy: Policy, lengths: list[int]) -> list[Tensor]:
    policy.zero_grad()
    scores = policy(pack_rows(tiny_rows(lengths)), temperature=0.7)
    (scores.logprobs.square().sum() + scores.entropy.sum()).backward()
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    return [scores.logprobs.detach(), scores.entropy.detach(), *(gradient.clone() for gradient in gradients)]


@pytest.mark.parametrize("checkpointing", ["full", pytest.param("none", marks=long)])
def test_log_probs_and_gradients_are_those_without_and_lengths_are_compiled_for_once(checkpointing: str):
    plain, compiled = policy_of(checkpointing), policy_of(checkpointing)
    graphs = compile_layers(compiled, backend=BACKEND)
    for lengths in LENGTHS:
        expected, found = (scores_and_gradients(policy, lengths) for policy in (plain, compiled))
        assert len(found) == len(expected) > 10
        for left, right in zip(found, expected, strict=True):
            assert torch.allclose(left, right, rtol=1e-4, atol=1e-5)
    known = graphs.count
    assert 0 < known <= 20
    for lengths in ([50], [2, 2, 30, 1], [1], [7] * 9):
        scores_and_gradients(compiled, lengths)
    assert graphs.count == known


@long
def test_sharded_layers_are_compiled_and_pass_the_isolation_check():
    with one_rank("cpu"):
        plain, compiled = policy_of("full"), policy_of("full")
        for policy in (plain, compiled):
            shard_model(policy, init_device_mesh("cpu", (1,)), small_bytes=0)
        graphs = compile_layers(compiled, backend=BACKEND)
        check_isolation(compiled, "cpu", VOCABULARY)
        reshard(compiled)
        expected, found = (scores_and_gradients(policy, [9, 1, 4]) for policy in (plain, compiled))
        for left, right in zip(found, expected, strict=True):
            left, right = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in (left, right))
            assert torch.allclose(left, right, rtol=1e-4, atol=1e-5)
        assert graphs.count > 0
        assert full_state_dict(compiled).keys() == full_state_dict(plain).keys()


def test_a_mixture_of_experts_is_refused():
    policy = Policy(tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    with pytest.raises(ModelError, match=r"experts.*critic\.compile=false"):
        compile_layers(policy, "critic")


def test_graphs_without_end_are_warned_of_once(caplog: pytest.LogCaptureFixture):
    graphs = CompiledGraphs("actor", most=3)
    counters["stats"]["unique_graphs"] += 3
    with caplog.at_level(logging.WARNING):
        graphs.check()
        assert not caplog.records
        counters["stats"]["unique_graphs"] += 1
        graphs.check()
        graphs.check()
    (record,) = caplog.records
    assert "actor.compile: 4 graphs were compiled, but at most 3 were expected" in record.message

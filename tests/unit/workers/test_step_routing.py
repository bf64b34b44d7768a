"""Recorded experts of a pass without gradients."""

import weakref
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from benchmarks.family_configs import tiny_config
from rlpack.models import attention
from rlpack.models.inputs import pack_rows
from rlpack.models.policy import Policy
from rlpack.models.routing import Routing, current_pass
from rlpack.workers.step_routing import RecordedRouting

ROWS = [torch.arange(3, 15), torch.arange(20, 25), torch.arange(30, 47)]


def tiny_policy() -> Policy:
    attention.register()
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), attn_implementation="rlpack")).eval()


def recorded(policy: Policy, routing: Routing, microbatches: list[list[Tensor]]) -> Tensor:
    recorder = RecordedRouting(routing, policy)
    for rows in microbatches:
        with torch.no_grad(), recorder.microbatch():
            policy(pack_rows(rows))
    return recorder.experts()


def test_recorded_experts_are_in_the_order_of_microbatches():
    policy = tiny_policy()
    routing = Routing(policy, policy)
    separate = recorded(policy, routing, [[row] for row in ROWS])
    shape = routing.shape
    assert separate.shape == (sum(map(len, ROWS)), shape.num_layers, shape.top_k)
    assert torch.equal(separate, recorded(policy, routing, [ROWS[:2], ROWS[2:]]))
    assert recorded(policy, routing, []).shape == (0, shape.num_layers, shape.top_k)


def test_the_device_holds_recorded_experts_of_one_microbatch_only():
    policy = tiny_policy()
    recorder = RecordedRouting(Routing(policy, policy), policy)
    with FakeTensorMode(allow_non_fake_inputs=True):  # the meta device stands for a GPU
        for row in ROWS:
            inputs = pack_rows([row])
            with recorder.microbatch():
                routing = current_pass()
                assert routing is not None
                routing.place_tokens(
                    replace(inputs, slots=inputs.slots.to("meta"), row_lengths=inputs.row_lengths.to("meta")), None
                )
                assert routing.recorded.device.type == "meta"
                on_device = weakref.ref(routing.recorded)
            del routing
            assert on_device() is None
        experts = recorder.experts()
    assert (experts.device.type, len(experts)) == ("cpu", sum(map(len, ROWS)))

"""Rows that share a prompt have the outputs and gradients of whole rows through transformers' own forward."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.models.inputs import ModelInputs, pack_rows, to_model_inputs
from rlpack.models.policy import Policy
from rlpack.models.routing import Routing, RoutingPass, in_pass
from rlpack.packing import Batching, make_plan
from tests.unit.models.tiny import KINDS, VOCABULARY, reference_scores, tiny_model

PROMPTS = (7, 7, 7, 7, 3, 3, 5)
RESPONSES = (4, 1, 0, 9, 6, 2, 3)  # the third is empty, and nothing but a prompt
GROUPS = (0, 0, 0, 0, 1, 1, 2)


def shared_rows(different: int | None = None) -> BatchedDataDict:
    """Return rows whose prompts are equal within groups, but for one token of the row `different`."""
    generator = torch.Generator().manual_seed(0)
    prompts: dict[int, torch.Tensor] = {}
    rows = []
    for row, (group, prompt, response) in enumerate(zip(GROUPS, PROMPTS, RESPONSES, strict=True)):
        tokens = torch.randint(VOCABULARY, (prompt + response,), generator=generator)
        tokens[:prompt] = prompts.setdefault(group, tokens[:prompt].clone())
        tokens[1] += row == different
        rows.append(tokens)
    return BatchedDataDict({"input_ids": Ragged.from_rows(rows, torch.int64)})


def inputs_of(batch: BatchedDataDict) -> ModelInputs:
    lengths = batch["input_ids"].lengths.numpy()
    batching = Batching(max_tokens=64, share_prompts=True)
    plan = make_plan(lengths, batching, dp_size=1, groups=np.array(GROUPS), prefixes=np.array(PROMPTS))
    (view,) = batch.shard(plan)[0].microbatches()
    assert view.index.tolist() == list(range(len(GROUPS)))
    return to_model_inputs(view, device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_gradients_are_those_of_whole_rows(kind: str):
    own = tiny_model(kind, implementation="eager" if kind == "gemma2" else "sdpa")
    policy, batch = Policy(tiny_model(kind)), shared_rows()
    inputs = inputs_of(batch)
    assert inputs.input_ids.shape == (1, 40)  # instead of 64
    scores = policy(inputs)
    expected = [reference_scores(own, row) for row in batch["input_ids"].rows()]
    logprobs, entropies = (torch.cat(parts) for parts in zip(*expected, strict=True))
    tolerance = 1e-6 if kind.startswith("gemma") else 1e-12  # its norms and eager attention compute in fp32
    assert torch.allclose(scores.logprobs, logprobs, rtol=0, atol=tolerance)
    assert torch.allclose(scores.entropy, entropies, rtol=0, atol=tolerance)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (scores.logprobs * weights).sum().backward()
    (logprobs * weights).sum().backward()
    of_own = dict(own.named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None
        gradient = of_own[name].grad
        assert gradient is not None
        assert (parameter.grad - gradient).norm() <= 1e-6 * gradient.norm(), name  # norms compute in fp32


def test_routers_count_and_balance_the_tokens_of_whole_rows():
    weights = torch.linspace(0.05, 0.25, len(GROUPS))
    results = []
    for inputs in (inputs_of(shared_rows()), pack_rows(list(shared_rows()["input_ids"].rows()))):
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        policy = Policy(tiny_model("qwen3_moe", dtype=torch.float32, head_dim=8, **sizes))
        measured = RoutingPass(Routing(policy.model, policy.model), weights, coefficient=1.0)
        with in_pass(measured):
            policy(inputs).logprobs.mul(0.01).sum().backward()
        gradients = [parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None]
        results.append((measured.load, measured.balance, torch.cat(gradients)))
    (load, balance, gradient), (of_whole, expected, of_rows) = results
    assert load.tolist() == of_whole.tolist()
    assert balance.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient - of_rows).norm() <= 1e-5 * of_rows.norm()


def test_rounding_a_row_up_adds_segments_that_see_themselves_alone(monkeypatch: pytest.MonkeyPatch):
    policy, batch = Policy(tiny_model()), shared_rows()
    whole = policy(inputs_of(batch)).logprobs
    monkeypatch.setattr("rlpack.models.inputs.rounded_rows", lambda count: count + 21)
    assert torch.allclose(policy(inputs_of(batch)).logprobs, whole, rtol=0, atol=1e-12)


def test_without_the_keys_of_their_prompts_rows_score_otherwise():
    policy, inputs = Policy(tiny_model()), inputs_of(shared_rows())
    assert inputs.packed is not None
    blind = replace(inputs, packed=replace(inputs.packed, keys=None))
    assert (policy(blind).logprobs - policy(inputs).logprobs).abs().max() > 0.01


def test_different_tokens_where_a_prompt_is_to_be_shared_are_an_error():
    message = r"row \d+ shares its prompt .* a token .* differs; .* set batching.share_prompts=false"
    with pytest.raises(DataError, match=message):
        inputs_of(shared_rows(different=3))


def test_moving_to_a_device_keeps_the_keys():
    moved = inputs_of(shared_rows()).to("cpu").packed
    assert moved is not None
    assert moved.keys is not None
    assert moved.keys.segments.lengths == (11, 8, 16, 9, 5, 8)

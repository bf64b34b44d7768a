import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlpack.models.attention import Segments
from rlpack.models.errors import ModelError
from rlpack.models.inputs import ModelInputs, pack_rows
from rlpack.models.policy import Policy
from tests.unit.models.tiny import KINDS, pad_rows, reference_scores, tiny_model, tiny_rows

# Gemma's norms compute in fp32, whatever the model's type.
TOLERANCE = {"gemma2": 5e-6, "gemma3": 5e-6}
ROWS = tiny_rows([9, 1, 13, 6])


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def reference_model(kind: str):
    # SDPA has no soft cap; the others are compared with it because eager attention softmaxes in fp32.
    return tiny_model(kind, implementation="eager" if kind == "gemma2" else "sdpa")


def weigh(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Return a loss with a different weight for each score of each token."""
    weights = torch.arange(1, logprobs.shape[0] + 1, dtype=logprobs.dtype)
    return (weights * logprobs).sum() + (weights.flip(0) * entropy.square()).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_scores_and_gradients_equal_those_of_each_row_alone(kind: str, layout: str):
    policy, reference = Policy(tiny_model(kind), chunk=5), reference_model(kind)
    inputs = pack_rows(ROWS) if layout == "packed" else pad_rows(ROWS, width=15)
    scores = policy(inputs, temperature=0.7)
    alone = [reference_scores(reference, row, 0.7) for row in ROWS]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*alone, strict=True))
    tolerance = TOLERANCE.get(kind, 1e-12)
    assert torch.allclose(scores.logprobs, logprobs, rtol=0, atol=tolerance)
    assert torch.allclose(scores.entropy, entropy, rtol=0, atol=tolerance)

    weigh(scores.logprobs, scores.entropy).backward()
    weigh(logprobs, entropy).backward()
    for (name, parameter), expected in zip(policy.model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        error = (parameter.grad - expected.grad).norm() / expected.grad.norm()
        assert error < tolerance, name


def test_the_comparison_detects_a_missing_segment_window_or_soft_cap():
    def scores(kind: str, inputs: ModelInputs, **changes: object) -> Tensor:
        return Policy(tiny_model(kind, **changes))(inputs).logprobs

    inputs = pack_rows(ROWS)
    borderless = ModelInputs(
        inputs.input_ids, inputs.position_ids, Segments.from_lengths([29]), inputs.slots, inputs.row_lengths
    )
    assert (scores("qwen2", borderless) - scores("qwen2", inputs)).abs().max() > 0.1
    assert (scores("mistral", inputs, sliding_window=64) - scores("mistral", inputs)).abs().max() > 0.1
    assert (scores("gemma2", inputs, attn_logit_softcapping=None) - scores("gemma2", inputs)).abs().max() > 0.01
    assert (scores("gemma2", inputs, final_logit_softcapping=None) - scores("gemma2", inputs)).abs().max() > 0.1


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 5))
def test_packed_equals_padded_for_any_lengths(lengths: list[int], extra: int):
    policy, rows = Policy(tiny_model("qwen2_sliding")), tiny_rows(lengths)
    packed, padded = policy(pack_rows(rows)), policy(pad_rows(rows, width=max(lengths) + 1 + extra))
    assert packed.logprobs.shape == (sum(lengths),)
    assert torch.allclose(packed.logprobs, padded.logprobs, rtol=0, atol=1e-12)
    assert torch.allclose(packed.entropy, padded.entropy, rtol=0, atol=1e-12)


def test_scores_are_zero_at_first_and_unselected_tokens_and_unchanged_elsewhere():
    policy = Policy(tiny_model())
    every = policy(pack_rows(ROWS))
    select = torch.rand(29, generator=torch.Generator().manual_seed(0)) < 0.5
    some = policy(pack_rows(ROWS), select=select)
    first = torch.zeros(29, dtype=torch.bool)
    first[[0, 9, 10, 23]] = True
    assert every.logprobs[first].eq(0).all()
    assert every.logprobs[~first].lt(0).all()
    assert some.logprobs[~select | first].eq(0).all()
    assert some.entropy[~select | first].eq(0).all()
    assert torch.allclose(some.logprobs[select], every.logprobs[select], rtol=0, atol=1e-14)


@pytest.mark.parametrize("packed", [True, False])
def test_a_dummy_microbatch_gives_every_weight_a_gradient_of_exactly_zero(packed: bool):
    policy = Policy(tiny_model())
    dummy = ModelInputs(
        input_ids=torch.zeros(1, 8, dtype=torch.int64),
        position_ids=torch.arange(8).unsqueeze(0),
        packed=Segments.from_lengths([8]) if packed else None,
        slots=torch.zeros(0, dtype=torch.int64),
        row_lengths=torch.zeros(0, dtype=torch.int64),
    )
    scores = policy(dummy)
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    found = gradients(policy)
    assert set(found) == {name for name, _ in policy.model.named_parameters()}
    assert all(gradient.eq(0).all() for gradient in found.values())


def test_a_microbatch_in_which_nothing_is_selected_gives_gradients_of_exactly_zero():
    policy = Policy(tiny_model())
    scores = policy(pack_rows(ROWS), select=torch.zeros(29, dtype=torch.bool))
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert all(gradient.eq(0).all() for gradient in gradients(policy).values())


def test_without_entropy_the_logprobs_are_the_same_and_entropies_zero():
    policy = Policy(tiny_model())
    scores = policy(pack_rows(ROWS), entropy=False)
    assert torch.equal(scores.logprobs, policy(pack_rows(ROWS)).logprobs)
    assert scores.entropy.eq(0).all()
    assert not scores.entropy.requires_grad


def test_gradient_checkpointing_changes_no_gradient():
    plain, checkpointed = Policy(tiny_model()), Policy(tiny_model())
    layer_runs = 0

    def count(*_: object) -> None:
        nonlocal layer_runs
        layer_runs += 1

    checkpointed.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(count)
    checkpointed.checkpoint_activations()
    for policy in (plain, checkpointed):
        policy.train()
        scores = policy(pack_rows(ROWS))
        weigh(scores.logprobs, scores.entropy).backward()
    assert layer_runs == 2
    expected = gradients(plain)
    for name, gradient in gradients(checkpointed).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-14), name


def test_dropout_of_heads_and_of_modules_inside_a_layer_does_not_forbid_checkpointing():
    model = tiny_model("gpt2", dtype=torch.float32, n_embd=32, n_layer=2, n_head=4)
    assert model.config.summary_first_dropout == model.config.resid_pdrop == 0.1
    policy = Policy(model)
    policy.train()
    plain = policy(pack_rows(ROWS))
    weigh(plain.logprobs, plain.entropy).backward()
    expected = gradients(policy)
    model.zero_grad()
    policy.checkpoint_activations()
    policy.train()
    scores = policy(pack_rows(ROWS))
    weigh(scores.logprobs, scores.entropy).backward()
    assert torch.equal(scores.logprobs, plain.logprobs)
    for name, gradient in gradients(policy).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-6), name


def test_dropout_that_a_layer_applies_itself_forbids_checkpointing():
    policy = Policy(tiny_model("opt", dropout=0.1, ffn_dim=48, word_embed_proj_dim=32))
    with pytest.raises(ModelError, match=r"OPTForCausalLM has dropout=0\.1, which critic\.gradient_checkpointing=full"):
        policy.checkpoint_activations(role="critic")

from dataclasses import replace

import pytest
import torch

from rlpack.algorithms import policy_loss
from rlpack.algorithms.policy_loss import PolicyTokens
from rlpack.algorithms.statistics import concat_tokens, kl_cov, statistics_of


def tokens_of(size: int, *, seed: int = 0) -> PolicyTokens:
    random = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, size, generator=random)
    mask = torch.rand(size, generator=random) < 0.8
    return PolicyTokens(new, old, advantages, mask, torch.tensor([size // 2, size - size // 2]))


def penalized(tokens: PolicyTokens, share: float) -> list[int]:
    """Return the tokens with the largest covariances, by sorting them."""
    rows = [(t, tokens.logprobs[t].item(), tokens.advantages[t].item()) for t in tokens.mask.nonzero()[:, 0].tolist()]
    mean = [sum(row[i] for row in rows) / len(rows) for i in (1, 2)]
    ranked = sorted(rows, key=lambda row: -(row[1] - mean[0]) * (row[2] - mean[1]))
    return sorted(row[0] for row in ranked[: max(1, int(share * len(rows)))])


@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5])
def test_kl_cov_penalizes_the_tokens_of_the_largest_covariances(share: float):
    tokens = tokens_of(60)
    compute = statistics_of(kl_cov)
    assert compute is not None
    loss = kl_cov(tokens, statistics=compute(tokens, share=share), share=share, coef=3.0)
    chosen = penalized(tokens, share)
    assert loss.clipped_high.nonzero()[:, 0].tolist() == chosen
    for t in tokens.mask.nonzero()[:, 0].tolist():
        difference = (tokens.logprobs[t] - tokens.old_logprobs[t]).item()
        expected = -tokens.ratio[t].item() * tokens.advantages[t].item() + (3.0 * abs(difference) if t in chosen else 0)
        assert loss.token_losses[t].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_statistics_of_a_step_do_not_depend_on_its_microbatches():
    parts = [tokens_of(size, seed=size) for size in (8, 3, 21)]
    compute = statistics_of(kl_cov)
    assert compute is not None
    step = compute(concat_tokens(parts), share=0.25)
    backwards = compute(concat_tokens(parts[::-1]), share=0.25)
    assert backwards == pytest.approx(step)
    # Each part alone would choose other tokens.
    chosen = [kl_cov(part, statistics=step, share=0.25).clipped_high.sum().item() for part in parts]
    assert sum(chosen) == int(0.25 * sum(part.mask.sum().item() for part in parts))


def test_a_step_without_response_tokens_penalizes_none():
    tokens = tokens_of(4)
    empty = PolicyTokens(
        tokens.logprobs, tokens.old_logprobs, tokens.advantages, torch.zeros(4, dtype=torch.bool), tokens.lengths
    )
    compute = statistics_of(kl_cov)
    assert compute is not None
    assert kl_cov(empty, statistics=compute(empty)).token_losses.tolist() == [0.0] * 4


@pytest.mark.parametrize("advantage", [0.0, 0.7])
def test_kl_cov_penalizes_no_token_if_all_advantages_are_equal(advantage: float):
    tokens = replace(tokens_of(500), advantages=torch.full((500,), advantage))
    compute = statistics_of(kl_cov)
    assert compute is not None
    assert not kl_cov(tokens, statistics=compute(tokens, share=0.1), share=0.1).clipped_high.any()


def test_kl_cov_never_penalizes_more_than_the_share_of_tokens_that_tie():
    # Probability 1 and the largest advantage: six tokens tie behind the first one, and three may be penalized.
    logprobs = torch.tensor([0.0] * 7 + [-1.0] * 8).split([4, 11])
    advantages = torch.tensor([2.0] + [1.0] * 6 + [-1.0] * 8).split([4, 11])
    parts = [
        PolicyTokens(new, new, advantage, torch.ones(len(new), dtype=torch.bool), torch.tensor([len(new)]))
        for new, advantage in zip(logprobs, advantages, strict=True)
    ]
    compute = statistics_of(kl_cov)
    assert compute is not None
    statistics = compute(concat_tokens(parts), share=0.2)
    chosen = [kl_cov(part, statistics=statistics, share=0.2).clipped_high for part in parts]
    assert torch.cat(chosen).nonzero()[:, 0].tolist() == [0]


def test_other_losses_need_no_statistics():
    assert statistics_of(policy_loss.ppo_clip) is None

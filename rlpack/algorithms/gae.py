"""Generalized advantage estimation over the response tokens of ragged rows.

Shape letters: T tokens, B rows, P tokens in the mask. Tokens outside the mask (prompts, tool outputs) are not decisions
of the policy: the recursion skips them, so each token's successor is the row's next token in the mask.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.batch.ragged import Ragged


class AdvantagesAndReturns(NamedTuple):
    """The training targets of actor and critic.

    Attributes:
        advantages: f32 [T], 0 outside the mask.
        returns: advantages + values, the critic's targets, f32 [T], 0 outside the mask.
    """

    advantages: Tensor
    returns: Tensor


def token_rewards(rewards: Tensor, mask: Ragged, penalties: Tensor | None = None) -> Tensor:
    """Return per-token rewards, f32 [T]: the row's reward at its last masked token, minus penalties.

    >>> mask = Ragged.from_rows([[False, True, True], [True, False]], torch.bool)
    >>> token_rewards(torch.tensor([1.0, 2.0]), mask)
    tensor([0., 0., 1., 2., 0.])

    Args:
        rewards: one per row, [B]; the reward of a row without tokens in the mask is ignored.
        mask: response tokens, bool, B rows.
        penalties: one per token, [T], such as a KL term; ignored outside the mask.
    """
    per_token = torch.zeros(mask.values.shape, dtype=torch.float32)
    tokens, rows = _masked_tokens(mask)
    if penalties is not None:
        per_token[tokens] -= penalties[tokens].float()
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[:-1] != rows[1:]
    per_token[tokens[is_last]] += rewards[rows[is_last]].float()
    return per_token


def compute_gae(
    values: Tensor, rewards: Tensor, mask: Ragged, *, gamma: float, gae_lambda: float
) -> AdvantagesAndReturns:
    """Return the advantages and returns of tokens (Schulman et al. 2016, arXiv:1506.02438).

    `A_t = δ_t + γλ·A_u` with `δ_t = r_t + γ·V_u - V_t`, where u is the row's next token in the mask; after the last
    one, value and advantage are 0. Computed in float64 for all rows at once: the recursion is a composition of linear
    maps, so a parallel scan solves it in log2(longest row) passes.

    >>> mask = Ragged.from_rows([[True, True]], torch.bool)
    >>> gae = compute_gae(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 2.0]), mask, gamma=1.0, gae_lambda=0.5)
    >>> gae.advantages, gae.returns
    (tensor([1., 1.]), tensor([1.5000, 2.0000]))

    Args:
        values: value of the state before each token, [T].
        rewards: one per token, [T].
        mask: response tokens, bool, B rows.
        gamma: discount γ, from 0 to 1.
        gae_lambda: λ, from 0 (one-step TD error) to 1 (Monte Carlo return minus the value).

    Raises:
        AlgorithmError: a factor is outside 0 to 1, a column has a different number of tokens, or a value or reward in
            the mask is not finite.
    """
    for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= factor <= 1:
            raise AlgorithmError(f"{name} is {factor}; it must be from 0 to 1")
    tokens, rows = _masked_tokens(mask)
    own = _select_finite("values", values, mask, tokens, rows)
    reward = _select_finite("rewards", rewards, mask, tokens, rows)
    has_next = torch.zeros_like(own)
    has_next[:-1] = (rows[:-1] == rows[1:]).double()
    following = torch.cat([own[1:], own.new_zeros(min(1, own.numel()))]) * has_next
    advantages = _scan(reward + gamma * following - own, gamma * gae_lambda * has_next)
    columns = torch.zeros(2, *mask.values.shape)
    columns[0, tokens], columns[1, tokens] = advantages.float(), (advantages + own).float()
    return AdvantagesAndReturns(columns[0], columns[1])


def _select_finite(name: str, column: Tensor, mask: Ragged, tokens: Tensor, rows: Tensor) -> Tensor:
    """Return the entries of a column at `tokens`, f64 [P], which must be finite."""
    if column.shape != mask.values.shape:
        raise AlgorithmError(f"{name} are {list(column.shape)} for {mask.values.numel()} tokens; pass one per token")
    selected = column[tokens].double()
    if not selected.isfinite().all():
        first = int((~selected.isfinite()).nonzero()[0])
        raise AlgorithmError(f"{name} of row {rows[first]} contain {selected[first].item()}; they must be finite")
    return selected


def _scan(terms: Tensor, factors: Tensor) -> Tensor:
    """Return x with `x_t = terms_t + factors_t · x_{t+1}`, all f64 [P]; the last factor is 0.

    After pass k, `terms` is the contribution of the next 2^k tokens and `factors` multiplies that of the rest, until
    all factors are 0 (Hillis and Steele, "Data parallel algorithms", 1986).
    """
    reach = 1
    while reach < terms.numel() and bool(factors.any()):
        shifted_terms = torch.zeros_like(terms)
        shifted_terms[:-reach] = terms[reach:]
        shifted_factors = torch.zeros_like(factors)
        shifted_factors[:-reach] = factors[reach:]
        terms, factors = terms + factors * shifted_terms, factors * shifted_factors
        reach *= 2
    return terms


def _masked_tokens(mask: Ragged) -> tuple[Tensor, Tensor]:
    """Return the positions of the tokens in the mask, and their rows, int64 [P] each."""
    tokens = mask.values.nonzero()[:, 0]
    return tokens, mask.segment_ids[tokens]

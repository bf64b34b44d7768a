"""Generalised advantage estimation, over the response tokens of ragged rows at once.

Letters: T tokens, B rows, P tokens that count. Tokens outside the mask (prompts, and what a tool or another player
said) are no decisions: value and advantage are carried through them, as if they weren't there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.batch.ragged import Ragged


class Estimates(NamedTuple):
    """What a critic and an actor are trained with.

    Attributes:
        advantages: f32 [T], 0 outside the mask.
        returns: what values should have been, advantages + values, f32 [T], 0 outside the mask.
    """

    advantages: Tensor
    returns: Tensor


def token_rewards(rewards: Tensor, mask: Ragged, penalties: Tensor | None = None) -> Tensor:
    """Return the reward of each token, f32 [T]: its row's, at the last token that counts, less its own penalty.

    >>> mask = Ragged.from_rows([[False, True, True], [True, False]], torch.bool)
    >>> token_rewards(torch.tensor([1.0, 2.0]), mask)
    tensor([0., 0., 1., 2., 0.])

    Args:
        rewards: of each row, [B]; that of a row without a token that counts is lost.
        mask: tokens that count, bool, B rows.
        penalties: of each token, [T]: a KL term, say; those outside the mask are left out.
    """
    found = torch.zeros(mask.values.shape, dtype=torch.float32)
    tokens, rows = _counted(mask)
    if penalties is not None:
        found[tokens] -= penalties[tokens].float()
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[:-1] != rows[1:]
    found[tokens[is_last]] += rewards[rows[is_last]].float()
    return found


def estimate(values: Tensor, rewards: Tensor, mask: Ragged, *, gamma: float, gae_lambda: float) -> Estimates:
    """Return the advantages and returns of tokens (Schulman et al. 2016, arXiv:1506.02438).

    `A_t = δ_t + γλ·A_u` with `δ_t = r_t + γ·V_u - V_t`, where u is the row's next token that counts; after the last
    one, value and advantage are 0. Computed in float64, for all rows at once: the recurrence is a composition of
    linear maps, so doubling their reach solves it in log2(longest row) passes.

    >>> mask = Ragged.from_rows([[True, True]], torch.bool)
    >>> found = estimate(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 2.0]), mask, gamma=1.0, gae_lambda=0.5)
    >>> found.advantages, found.returns
    (tensor([1., 1.]), tensor([1.5000, 2.0000]))

    Args:
        values: of what lies before each token, [T].
        rewards: of each token, [T].
        mask: tokens that count, bool, B rows.
        gamma: γ, from 0 to 1.
        gae_lambda: λ, from 0 (the critic alone) to 1 (rewards alone, less the value as a baseline).

    Raises:
        AlgorithmError: a factor is outside of 0 to 1, a column has another number of tokens, or a value or reward that
            counts is no finite number.
    """
    for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= factor <= 1:
            raise AlgorithmError(f"{name} is {factor}; it has to be from 0 to 1")
    tokens, rows = _counted(mask)
    kept = []
    for name, column in (("values", values), ("rewards", rewards)):
        if column.shape != mask.values.shape:
            raise AlgorithmError(f"{name} are {list(column.shape)} for {mask.values.numel()} tokens; give one a token")
        kept.append(column[tokens].double())
        if not kept[-1].isfinite().all():
            at = int((~kept[-1].isfinite()).nonzero()[0])
            raise AlgorithmError(f"{name} of row {rows[at]} hold {kept[-1][at].item()}, which is no finite number")
    own, paid = kept
    goes_on = torch.zeros_like(own)
    goes_on[:-1] = (rows[:-1] == rows[1:]).double()
    following = torch.cat([own[1:], own.new_zeros(min(1, own.numel()))]) * goes_on
    advantages = _accumulate(paid + gamma * following - own, gamma * gae_lambda * goes_on)
    found = torch.zeros(2, *mask.values.shape)
    found[0, tokens], found[1, tokens] = advantages.float(), (advantages + own).float()
    return Estimates(found[0], found[1])


def _accumulate(terms: Tensor, factors: Tensor) -> Tensor:
    """Return x with `x_t = terms_t + factors_t · x_{t+1}`, all f64 [P]; the last factor is 0.

    After pass k, `terms` holds what the next 2^k tokens add up to and `factors` what the rest is multiplied by, until
    all of these are 0 (Hillis and Steele, "Data parallel algorithms", 1986).
    """
    reach = 1
    while reach < terms.numel() and bool(factors.any()):
        further = torch.zeros_like(terms)
        further[:-reach] = terms[reach:]
        beyond = torch.zeros_like(factors)
        beyond[:-reach] = factors[reach:]
        terms, factors = terms + factors * further, factors * beyond
        reach *= 2
    return terms


def _counted(mask: Ragged) -> tuple[Tensor, Tensor]:
    """Return the positions of the tokens that count, and their rows, int64 [P] each."""
    tokens = mask.values.nonzero()[:, 0]
    return tokens, mask.segment_ids[tokens]

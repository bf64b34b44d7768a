"""The canary: after every load an engine scores a fixed prompt, and so does the trainer.

If a weight was lost, mixed up or rounded on its way, the log-probs differ, and the run stops before a token is sampled
with it. The prompt is random tokens, so that every layer contributes. The cost is one forward pass of 64 tokens on each
side.
"""

import torch
from torch import Tensor

from rlpack.rollout.errors import CanaryError

_NUM_ROWS, _NUM_TOKENS, _SEED = 4, 16, 20

# Largest difference in nats, by the less precise type of the two forward passes. Two correct passes of random Qwen2
# models of 2 to 24 layers differ by at most 2e-6 nats in fp32 and by 0.002 to 1.3 nats in bf16, which therefore only
# shows weights that were lost or mixed up.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 2.0}


def canary_tokens(vocab_size: int) -> Tensor:
    """Return the fixed prompt, int64 [4, 16]; the same for the same vocabulary.

    >>> canary_tokens(100).shape
    torch.Size([4, 16])
    """
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(vocab_size, (_NUM_ROWS, _NUM_TOKENS), generator=generator)


def canary_tolerance(*dtypes: torch.dtype) -> float:
    """Return the largest difference in nats between correct forward passes in these types."""
    return max(TOLERANCES[dtype] for dtype in dtypes)


def check_canary(logprobs: Tensor, expected: Tensor, token_ids: Tensor, *, tolerance: float, version: int) -> float:
    """Return the largest difference between the engine's and the trainer's log-probs, in nats.

    Args:
        logprobs: the engine's, f32 [R, L].
        expected: the trainer's, f32 [R, L].
        token_ids: the canary, int64 [R, L].
        tolerance: largest difference allowed.
        version: policy version of the weights.

    Raises:
        CanaryError: the difference exceeds the tolerance or is NaN.
    """
    gaps = (logprobs - expected).abs().nan_to_num(torch.inf)
    gap = gaps.max().item()
    if gap <= tolerance:
        return gap
    worst = gaps.flatten().topk(3).indices.tolist()
    columns = zip(*(column.flatten()[worst].tolist() for column in (token_ids, logprobs, expected)), strict=True)
    listed = ", ".join(f"token {token} (engine {own:.5g}, trainer {other:.5g})" for token, own, other in columns)
    raise CanaryError(
        f"log-probs of the canary at policy version {version} differ from the trainer's by up to {gap:.3g} nats "
        f"(tolerance {tolerance:g}), most at {listed}; weights were corrupted in transfer, or the engine computes "
        "another function of them than the trainer"
    )

"""A judge that penalizes repetition."""

import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.worker import RankContext, Worker, sharded


class RepetitionWorker(Worker):
    """Rewards a response with `-weight` times the fraction of its token n-grams that occurred in it before.

    The fraction is added to the batch as the column `repeated`, which an advantage function can name as an argument.
    """

    def __init__(self, context: RankContext, *, n: int = 4, weight: float = 1.0) -> None:
        super().__init__(context)
        self.n, self.weight = n, weight

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards` f32 [B], `quarantined` bool [B] (all false) and `repeated` f32 [B]."""
        rows = zip(shard["input_ids"].rows(), shard["response_mask"].rows(), strict=True)
        repeated = torch.tensor([self._repeated(tokens[mask].tolist()) for tokens, mask in rows], dtype=torch.float32)
        quarantined = torch.zeros_like(repeated, dtype=torch.bool)
        columns = {"rewards": -self.weight * repeated, "quarantined": quarantined, "repeated": repeated}
        return shard.keep([]).union(columns)

    def _repeated(self, tokens: list[int]) -> float:
        grams = [tuple(tokens[start : start + self.n]) for start in range(len(tokens) - self.n + 1)]
        return 1.0 - len(set(grams)) / len(grams) if grams else 0.0

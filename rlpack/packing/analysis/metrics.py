"""How well a plan uses its slots, and how evenly its ranks are loaded."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class PackingMetrics:
    """Figures of a whole plan; fillers count as slots, but neither as microbatches nor as bins.

    Attributes:
        num_microbatches: microbatches that hold rows, over all ranks and optimizer steps.
        bin_utilisation: real tokens / (microbatches × token budget); without a budget, × the largest microbatch.
        waste_ratio: slots that hold no real token / all slots: the share of the computation that is thrown away.
        bin_balance: mean slots / most slots of a microbatch; 1 when all are alike.
        packing_efficiency: fewest microbatches that the rows could be packed into / microbatches.
        rank_imbalance: most slots of a rank / the ranks' mean − 1, weighted over optimizer steps.
        lockstep_overhead: Σ_i max_rank cost(rank, i) / (Σ cost / ranks) − 1: how much longer a step takes than
            on ranks that never wait for each other at a microbatch; 0 is the bound.
        dummy_microbatches: microbatches without rows.
        overlong: rows over the token budget, whatever was done about them.
        dropped: rows left out.
        truncated_tokens: tokens cut off.
        real_tokens: tokens that are computed on and are no padding.
        slots: all slots, padding and fillers included.
        microbatches_per_rank: of a rank, over all optimizer steps, fillers included.
        critical_slots: slots of the dearest microbatch of each index, added up: what a step waits for.
        critical_squares: squared slots of the sequences of these microbatches, added up: their attention.
        search_limit_hits: optimizer steps in which the search of `algorithm=optimal` ended at its budget, with more
            microbatches than are known to be needed.
        groups_split: groups that no microbatch could hold, and that were split where that was allowed.
    """

    num_microbatches: int
    bin_utilisation: float
    waste_ratio: float
    bin_balance: float
    packing_efficiency: float
    rank_imbalance: float
    lockstep_overhead: float
    dummy_microbatches: int
    overlong: int
    dropped: int
    truncated_tokens: int
    real_tokens: int
    slots: int
    microbatches_per_rank: int
    critical_slots: int
    critical_squares: float
    search_limit_hits: int = 0
    groups_split: int = 0

    def as_dict(self) -> dict[str, float]:
        """Return name and value of every figure, for logging."""
        return {name: float(value) for name, value in asdict(self).items()}

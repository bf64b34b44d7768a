"""The ranks that work on the same rows, as far as token budgets, times and memory depend on their number."""

from dataclasses import asdict, dataclass
from math import lcm

from rlpack.packing.lengths import check_count


@dataclass(frozen=True)
class DataRank:
    """The ranks of a data-parallel rank.

    Attributes:
        cp: ranks that share the tokens of a row.
        tp: ranks that share a layer, and outside attention and MLP the tokens.
        pp: pipeline stages.
        chunks: chunks that each row is cut into so that its ranks get equally many tokens; rows are aligned to them.

    Raises:
        PackingError: a size is not a whole number of at least 1.
    """

    cp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        """Check every size."""
        for name, size in asdict(self).items():
            check_count(size, name)

    @property
    def num_ranks(self) -> int:
        """The number of ranks, which share the FLOPs."""
        return self.cp * self.tp * self.pp

    @property
    def num_activation_ranks(self) -> int:
        """The number of ranks that share the activations of a microbatch.

        Pipeline stages don't count: the first one holds as many microbatches as there are stages.
        """
        return self.cp * self.tp

    def aligned(self, multiple: int) -> int:
        """Return the alignment of rows that are also cut into chunks.

        >>> DataRank(cp=2, chunks=4).aligned(6)
        12
        """
        return lcm(multiple, self.chunks)


SINGLE_RANK = DataRank()

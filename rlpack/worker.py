"""The base of every role.

A role is a plain class without Ray, so it can be built and tested in one process. One instance runs on each rank of the
role's pool, and the driver calls its methods as their decorators declare (`rlpack.distributed.dispatch`):

    class Shout(Worker):
        @sharded(reads=("completion",), returns=("rewards", "quarantined"))
        def score(self, shard):
            return shard.keep([]).union(...)      # rows may come in any order: they carry their ids

One line of configuration starts it: `roles.shout.target=my_package.shout:Shout`. A role that is trained also derives
from `Trainable`, and is saved and resumed with the run.
"""

from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from rlpack.config.schema import Config
from rlpack.distributed.column_contract import TEXT_COLUMNS
from rlpack.distributed.context import RankContext
from rlpack.distributed.dispatch import broadcast, one_rank, rank_zero, sharded
from rlpack.distributed.trainable import Trainable

__all__ = ["TEXT_COLUMNS", "RankContext", "Trainable", "Worker", "broadcast", "one_rank", "rank_zero", "sharded"]


class Worker:
    """One rank of a role.

    Attributes:
        context: the rank's place in its pool.
        background_threads: number of calls of methods with `@sharded(background=True)` that the rank runs at the same
            time, for example as many as a server takes. `__init__` may set it. With more than 1, these methods have to
            be safe to call concurrently, and calls may end in any order.
    """

    background_threads: int = 1

    def __init__(self, context: RankContext) -> None:
        self.context = context

    @classmethod
    def from_settings(
        cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase, /, *args: Any, **arguments: Any
    ) -> Self:
        """Build the role on one rank; `arguments` come from its section of `roles`.

        A subclass that reads the configuration or the tokenizer overrides this and passes the sections that it needs to
        its `__init__`.
        """
        return cls(context, *args, **arguments)

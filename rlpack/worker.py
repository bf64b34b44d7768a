"""The base of every role.

A role is a plain class: no Ray in it, so it is made and tested in one process. An instance lives on each rank of the
role's pool, and the driver calls its methods as their dispatch decorators say (`rlpack.distributed.dispatch`):

    class Shout(Worker):
        @sharded()
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
from rlpack.distributed.dispatch import broadcast, rank_zero, sharded
from rlpack.distributed.trainable import Trainable

__all__ = ["TEXT_COLUMNS", "RankContext", "Trainable", "Worker", "broadcast", "rank_zero", "sharded"]


class Worker:
    """One rank of a role."""

    def __init__(self, context: RankContext) -> None:
        self.context = context

    @classmethod
    def from_settings(
        cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase, *args: Any, **arguments: Any
    ) -> Self:
        """Build the role on one rank, `arguments` those that its section of `roles` gives.

        A subclass that reads the configuration or the tokenizer overrides this, picks the sections that it needs and
        hands them to its `__init__`.
        """
        return cls(context, *args, **arguments)

"""The virtual stages of a pipeline rank: several runs of layers, one of which runs in each forward pass.

While a virtual stage runs, the language model has only its layers, with placeholders for the others, for the embedding
and for the norm (`rlpack.models.pipeline_parallel`). Between passes it has the layers of all, so weights keep their
names, and each weight is sharded, saved and counted once.

A pass outside of `running` runs all virtual stages, one after the other. Checks call the model this way, because they
need the outputs at once. In the backward pass, too, each waits for the one before it, so that all ranks use the same
order.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class VirtualStages:
    """The virtual stages of a rank, whose language model runs the active one.

    Attributes:
        active: the virtual stage that runs, from 0; None for all, one after the other.
        previous: hidden states that the virtual stage before this one has sent in the same pass; None if it is first.
    """

    def __init__(self, base: nn.Module, modules: Sequence[Mapping[str, nn.Module]]) -> None:
        """Have the forward pass of a language model run the active virtual stage.

        Args:
            base: the language model.
            modules: for each virtual stage, the children of `base` to run in place of its own.
        """
        self.active: int | None = None
        self.previous: Tensor | None = None
        self._base, self._modules = base, modules
        self._forward = base.forward

        @functools.wraps(base.forward)  # callers read the names of its arguments
        def run(*arguments: Any, **options: Any) -> Any:
            return self._run(arguments, options)

        base.forward = run

    @property
    def has_last(self) -> bool:
        """Whether the last virtual stage runs."""
        return self.active is None or self.active == len(self._modules) - 1

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Run a virtual stage alone inside the context."""
        before, self.active = self.active, number
        try:
            yield
        finally:
            self.active = before

    def _run(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Run the active virtual stage, or all; return the outputs of the last one."""
        outputs = None
        try:
            for number in range(len(self._modules)) if self.active is None else [self.active]:
                with self._children_of(number):
                    outputs = self._forward(*arguments, **options)
                self.previous = outputs[0]
        finally:
            self.previous = None
        return outputs

    @contextmanager
    def _children_of(self, number: int) -> Iterator[None]:
        """Give the language model the modules of a virtual stage inside the context."""
        children = self._base._modules
        own = {name: children[name] for name in self._modules[number]}
        children.update(self._modules[number])
        try:
            yield
        finally:
            children.update(own)

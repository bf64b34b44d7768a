"""One optimizer step of a trained model: forward and backward over its microbatches, then the optimizer.

Gradients are summed over microbatches and ranks, never averaged: a loss carries its global denominators.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rlpack.algorithms.metric_reduction import MetricAccumulator
from rlpack.batch.batch import MicrobatchView
from rlpack.checkpoint.background import BackgroundSaver
from rlpack.checkpoint.sharded import load_training_state, save_training_state
from rlpack.config.sections.optimization import Optimizer
from rlpack.models.optimizers import build_optimizer, set_learning_rate, steps_taken
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import clip_grad_norm, set_gradient_sync
from rlpack.models.pipeline_parallel import add_tied_gradients
from rlpack.models.pipeline_schedule import pipeline_turns
from rlpack.models.policy import TokenScores
from rlpack.spans import span
from rlpack.worker import RankContext
from rlpack.workers.loss import MicrobatchLoss

S = TypeVar("S", bound=TokenScores | Tensor)


class OptimizerStepper:
    """One rank of a trained model (FSDP2) and its optimizer.

    Attributes:
        model: the trained model.
        saver: writes checkpoints in the background.
    """

    def __init__(self, role: str, model: PackedModel, settings: Optimizer, context: RankContext) -> None:
        """Build the optimizer.

        Args:
            role: prefix of the metrics' names.
            model: the trained model; shard it first, because the optimizer refers to its parameters.
            settings: the optimizer's section of the configuration.
            context: the rank's place in the pool.
        """
        self.model = model
        self.saver = BackgroundSaver()
        self._role = role
        self._settings = settings
        self._context = context
        self._optimizer = self._new_optimizer()

    @property
    def steps_taken(self) -> int:
        """Return the number of optimizer steps taken, including those before a checkpoint."""
        return steps_taken(self._optimizer)

    def reset_optimizer(self) -> None:
        """Replace the optimizer with a new one without moments."""
        self._optimizer = self._new_optimizer()

    def step(
        self,
        views: Sequence[MicrobatchView],
        forward: Callable[[MicrobatchView, int], S],
        loss: Callable[[S, MicrobatchView], MicrobatchLoss],
        learning_rate: float,
    ) -> dict[str, float]:
        """Run forward and backward over the microbatches of one optimizer step, then the optimizer.

        Pipeline stages run them in the order of their schedule. Only the last stage computes losses.

        Args:
            views: this rank's microbatches, dummy ones included; all ranks have the same number.
            forward: maps (microbatch, 1-based index) to the model's outputs, with gradient; called once for each of
                this rank's virtual stages.
            loss: maps (outputs, microbatch) to its loss.
            learning_rate: learning rate of this step.

        Returns:
            This rank's parts of the metrics, named `role/metric`.
        """
        model = self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        sums, waiting = MetricAccumulator(), defaultdict[int, deque[MicrobatchLoss]](deque)
        turns = list(pipeline_turns(len(views), model.stage))
        for number, (direction, place, virtual) in enumerate(turns, 1):
            view = views[place]
            with span(direction):
                if direction == "forward":
                    with model.virtual_stage(virtual):
                        outputs = forward(view, place + 1)
                        waiting[virtual].append(loss(outputs, view) if model.has_outputs else _placeholder(outputs))
                else:
                    part = waiting[virtual].popleft()
                    set_gradient_sync(model, last=number == len(turns))
                    part.value.backward()
                    sums.add(part.metrics)
        if model.compiled is not None:
            model.compiled.check()
        with span("optimizer"):
            add_tied_gradients(model)
            if model.stage is not None:
                model.stage.settle()
            grad_norm = clip_grad_norm(model, self._settings.max_grad_norm)
            metrics = sums.result() | self._apply(grad_norm, learning_rate)
        return {f"{self._role}/{name}": value for name, value in metrics.items()}

    def save(self, folder: str) -> None:
        """Write this rank's part of weights and optimizer state into `folder`; a collective."""
        save_training_state(self.model, self._optimizer, Path(folder))

    def start_save(self, folder: str, timeout_s: float) -> None:
        """Copy weights and optimizer state, and start to write the copy into `folder`; a collective."""
        self.saver.start(self.model, self._optimizer, Path(folder), timeout_s=timeout_s)

    def load(self, folder: str) -> None:
        """Restore weights and optimizer state, saved on any number of ranks; a collective.

        Learning rate and weight decay stay those of the configuration, which may have changed since the save.
        """
        load_training_state(self.model, self._optimizer, Path(folder))

    def _apply(self, grad_norm: float, learning_rate: float) -> dict[str, float]:
        """Take the optimizer step; skip and count zero or non-finite gradients.

        On a zero gradient AdamW would still move the weights by its momentum; a NaN would spread to all weights.
        """
        skip = not np.isfinite(grad_norm) or grad_norm == 0
        set_learning_rate(self._optimizer, learning_rate)
        if not skip:
            self._optimizer.step()
        if not self._context.is_reporting_rank:
            return {}  # metrics are summed over ranks, and these are the same on every rank: one rank reports them
        return {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped_steps": float(skip)}

    def _new_optimizer(self) -> torch.optim.Optimizer:
        model, whole = self.model, self.model.uncut
        return build_optimizer(model.pattern_root, self._settings, model.offload, whole=whole.pattern_root)


def _placeholder(outputs: TokenScores | Tensor) -> MicrobatchLoss:
    """Return a placeholder loss, without metrics, on which a stage without outputs calls `backward`."""
    return MicrobatchLoss((outputs if isinstance(outputs, Tensor) else outputs.logprobs).sum(), {})

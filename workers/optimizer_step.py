"""A model that is trained: forward and backward over microbatches, one optimizer step, its state on disk."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from rlpack.algorithms.metric_reduction import MetricAccumulator
from rlpack.batch.batch import MicrobatchView
from rlpack.checkpoint.sharded import load_training_state, save_training_state
from rlpack.config.sections.optimization import Optimizer
from rlpack.models.optimizers import build_optimizer, set_learning_rate, steps_taken
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import accumulate, clip_grad_norm
from rlpack.worker import RankContext
from rlpack.workers.loss import MicrobatchLoss


class OptimizerStepper:
    """One rank of a trained model (FSDP2) and its optimizer, for the actor and the critic.

    Attributes:
        model: the model.
        steps_taken: optimizer steps, those before a checkpoint included.
    """

    def __init__(self, role: str, model: PackedModel, settings: Optimizer, context: RankContext) -> None:
        """Make the optimizer.

        Args:
            role: what names of metrics begin with.
            model: sharded already, where it is to be.
            settings: of the optimizer.
            context: the rank's place.
        """
        self.model = model
        self._role = role
        self._settings = settings
        self._context = context
        self._optimizer = self._new_optimizer()

    @property
    def steps_taken(self) -> int:
        """Return the optimizer steps taken so far."""
        return steps_taken(self._optimizer)

    def reset_optimizer(self) -> None:
        """Replace the optimizer by a new one without moments."""
        self._optimizer = self._new_optimizer()

    def step(
        self,
        views: Sequence[MicrobatchView],
        microbatch_loss: Callable[[MicrobatchView, int], MicrobatchLoss],
        learning_rate: float,
    ) -> dict[str, float]:
        """Run forward and backward over the microbatches of one optimizer step, then the optimizer.

        Args:
            views: this rank's microbatches, dummy ones included; all ranks have the same number.
            microbatch_loss: maps (microbatch, 1-based index) to its loss.
            learning_rate: of this step.

        Returns:
            This rank's parts of the metrics, named `role/metric`.
        """
        model = self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        sums = MetricAccumulator()
        for number, view in enumerate(views, start=1):
            accumulate(model, last=number == len(views))
            loss = microbatch_loss(view, number)
            loss.value.backward()
            sums.add(loss.metrics)
        grad_norm = clip_grad_norm(model, self._settings.max_grad_norm)
        metrics = sums.result() | self._apply(grad_norm, learning_rate)
        return {f"{self._role}/{name}": value for name, value in metrics.items()}

    def save(self, folder: str) -> None:
        """Write this rank's part of weights and optimizer state into `folder`; a collective."""
        save_training_state(self.model, self._optimizer, Path(folder))

    def load(self, folder: str) -> None:
        """Read weights and moments back, saved on any number of ranks; a collective.

        The checkpoint's learning rate and decays give way to the configuration's, which may have changed since.
        """
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        load_training_state(self.model, self._optimizer, Path(folder))
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)

    def _apply(self, grad_norm: float, learning_rate: float) -> dict[str, float]:
        """Take the optimizer step, unless no token had a gradient or the gradient is not a number: both are counted.

        AdamW would move the weights by its momentum alone, and a NaN would spread to all of them.
        """
        skip = not np.isfinite(grad_norm) or grad_norm == 0
        set_learning_rate(self._optimizer, learning_rate)
        if not skip:
            self._optimizer.step()
        if self._context.rank > 0:
            return {}  # these are figures of the step, not parts of it: one rank reports them
        return {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped_steps": float(skip)}

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model.pattern_root, self._settings)

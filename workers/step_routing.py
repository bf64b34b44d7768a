"""The routing of a trained mixture of experts over one optimizer step: its balance loss and its metrics."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.sections.optimization import Experts
from rlpack.models.errors import ModelError
from rlpack.models.packed import PackedModel
from rlpack.models.routing import Routing, RoutingPass, in_pass


def routing_of(model: PackedModel) -> Routing | None:
    """Wrap the routers of a sharded model; None if it has none of a known kind."""
    split, weight_split = model.split, model.weight_split
    try:
        return Routing(
            model,
            model.uncut,
            row_group=None if split is None else split.group,
            is_counted=weight_split is None or weight_split.rank == 0,
        )
    except ModelError:  # options that need routers are refused before the start
        return None


class RecordedRouting:
    """The routing of a pass without gradients, microbatch by microbatch.

    The device holds that of one microbatch, with virtual stages of those that haven't passed all of them.
    """

    def __init__(self, routing: Routing, model: PackedModel) -> None:
        self._routing, self._model = routing, model
        self._num_virtual = 1 if model.stage is None else model.stage.num_virtual
        self._device = torch.device("cpu")
        self._parts: list[Tensor] = []
        self._num_parts = Counter[int]()  # passes of each virtual stage, in the order of microbatches

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Record the routing of the forward pass inside the context."""
        routing, virtual = RoutingPass(self._routing, records=True), self._model.active_virtual_stage
        with in_pass(routing):
            yield
        number = self._num_parts[virtual]
        self._num_parts[virtual] += 1
        if number < len(self._parts):
            self._parts[number] += routing.recorded  # other layers; those of other passes are 0
        else:
            self._parts.append(routing.recorded)
        self._device = routing.recorded.device
        if all(self._num_parts[each] > number for each in range(self._num_virtual)):
            self._parts[number] = self._parts[number].cpu()

    def experts(self) -> Tensor:
        """Return the experts of all tokens in the order of microbatches, [T, L, k] on the CPU; a collective.

        They are summed as bytes: each byte is nonzero on at most one rank, and no backend sums int16.
        """
        wholes = [RoutingPass(self._routing).recorded]  # has the shape and dtype for no microbatch
        for part in self._parts:
            raw = part.view(torch.uint8)
            if self._routing.row_group is not None:
                raw = raw.to(self._device)
                dist.all_reduce(raw, group=self._routing.row_group)
            if self._model.stage is not None:
                raw = self._model.stage.total(raw)
            wholes.append(raw.view(part.dtype).cpu())
        return torch.cat(wholes)


class StepRouting:
    """Sums over the microbatches of an optimizer step."""

    def __init__(self, routing: Routing, settings: Experts) -> None:
        self._routing, self._settings = routing, settings
        self._load = torch.zeros(routing.shape.num_layers, routing.shape.num_experts, dtype=torch.float64)
        self._balance = torch.zeros((), dtype=torch.float64)
        self._changed = torch.zeros((), dtype=torch.float64)
        self._replays = False

    @contextmanager
    def microbatch(self, rows: BatchedDataDict, *, replay: bool) -> Iterator[None]:
        """Balance and measure the routers in the forward pass of a microbatch inside the context.

        Args:
            rows: `response_mask`, and `token_weight` f32 [B], whose sum over all response tokens of the step is 1.
            replay: whether to replay the column `routed_experts`.
        """
        self._replays = replay
        weights = rows["token_weight"] * rows["response_mask"].count_nonzero()
        routing = RoutingPass(
            self._routing,
            weights,
            coefficient=self._settings.balance_coefficient,
            replay=rows["routed_experts"].values if replay else None,
        )
        with in_pass(routing):
            yield
        self._changed = self._changed.to(routing.changed.device) + routing.changed
        self._load = self._load.to(routing.load.device) + routing.load
        self._balance = self._balance.to(routing.balance.device) + routing.balance

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step over all ranks, without the role's name; a collective."""
        shape = self._routing.shape
        sums = torch.cat([self._load.flatten(), self._balance[None], self._changed[None]])
        dist.all_reduce(sums)
        load = sums[:-2].view(shape.num_layers, shape.num_experts).cpu()
        balance = sums[-2].item() / shape.num_layers
        measured = {"moe_balance_loss": balance} if balance > 0 else {}  # unknown if no router has known scores
        if self._replays:
            choices = load.sum().item() / shape.top_k
            measured["moe_replay_changed"] = sums[-1].item() / max(choices, 1.0)
        return measured | _imbalance(load)

    def weighted_loss(self, metrics: dict[str, float]) -> float:
        """Return what the balance loss adds to the loss of the step.

        Args:
            metrics: from `metrics`.
        """
        shape, coefficient = self._routing.shape, self._settings.balance_coefficient
        return coefficient * shape.num_layers * metrics.get("moe_balance_loss", 0.0)


def _imbalance(load: Tensor) -> dict[str, float]:
    """Return the mean and maximum over layers of the busiest expert's load relative to the mean; {} if not known.

    `load` is f64 [L, E].
    """
    if not load.any():  # routers of an unknown kind
        return {}
    ratios = load.amax(1) / load.mean(1).clamp(min=1e-9)
    return {"moe_load_imbalance": ratios.mean().item(), "moe_load_imbalance_max": ratios.max().item()}

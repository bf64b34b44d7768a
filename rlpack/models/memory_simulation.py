"""Measure the memory of a rank by running its code on tensors without values.

A training step runs as on a rank: FSDP2 gathers weights and sums gradients, ranks of tensor and context parallelism
exchange tokens, and activations are kept or recomputed. Tensors have shapes and no memory (torch's fake tensors), and
other ranks don't exist (`rlpack.models.fake_ranks`), so that this takes seconds for a model of any size. Live memory is
counted (`rlpack.models.live_bytes`), not computed from formulas that would repeat the code.

Differences from a run:

- Padded rows count as a packed row of as many slots.
- The output layer scores all tokens, and all experts get equally many tokens.
- Clipping and metrics, which take a few numbers per weight or per token, are left out.
- Optimizer state and the temporary tensors of the optimizer's step are calculated, not measured.

Letters: T slots of a microbatch, d hidden size.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from rlpack.config.sections.compute import Offload
from rlpack.config.sections.optimization import Optimizer
from rlpack.models.attention import SegmentKeys, Segments
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.inputs import ModelInputs
from rlpack.models.kernel_device import kernels_of
from rlpack.models.live_bytes import LiveBytes, Peak, Use, highest
from rlpack.models.offloaded_adamw import BUCKET_BYTES
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard, set_gradient_sync
from rlpack.models.parts import allocate, local_part
from rlpack.models.pipeline_schedule import pipeline_turns
from rlpack.models.policy import Policy
from rlpack.models.repeated_layers import Repetition, extrapolate, own_layers
from rlpack.models.stage_link import StageLink

# The size of a rank's part of a weight from which torchao keeps moments in 8 bits, and of its blocks, each with one
# scale.
_LEAST_8BIT, _BLOCK = 4096, 256


@dataclass(frozen=True)
class SimulatedMicrobatch:
    """The largest microbatch of a role.

    Attributes:
        slots: slots of all ranks that share it (cp).
        longest: tokens of a row; all rows but the last have this length.
        prompt: leading tokens that the rows of a group share; at most `longest` - 1.
        group: rows of a group.
    """

    slots: int
    longest: int
    prompt: int = 0
    group: int = 1

    def inputs(self) -> ModelInputs:
        """Return a packed row."""
        own = self._own_lengths()
        segments = Segments.from_lengths(own)
        if self.prompt:
            shared = [self.prompt if row % self.group else 0 for row in range(len(own))]
            keys = Segments.from_lengths([sum(lengths) for lengths in zip(own, shared, strict=True)])
            places = torch.zeros(sum(keys.lengths), dtype=torch.int64)
            segments = replace(segments, keys=SegmentKeys(keys, places))
        ids = torch.zeros(1, self.slots, dtype=torch.int64)
        return ModelInputs(ids, ids.clone(), segments, ids.flatten(), torch.tensor(own))

    def _own_lengths(self) -> list[int]:
        """Return the slots of each row."""
        of_group = [self.longest, *[self.longest - self.prompt] * (self.group - 1)]
        num_groups = -(-self.slots // sum(of_group))
        ends = [min(end, self.slots) for end in accumulate(of_group * num_groups)]
        return [end - start for start, end in pairwise([0, *ends]) if end > start]


@dataclass(frozen=True)
class ModelMemory:
    """The bytes of a role's model on one rank.

    Attributes:
        weights: this rank's part, and buffers.
        optimizer: state of the optimizer; 0 if the role is not trained.
        gradients: this rank's part after a step, which is kept until the next.
        at_peak: live bytes by use at the peak of a pass over microbatches, including weights and optimizer.
        most: maximum live bytes of each use, possibly at different times.
        step: peak of live bytes in the optimizer's step.
        transient: peak of a pass apart from weights, optimizer and gradients that are kept, which `offload=parameters`
            leaves on a GPU.
    """

    weights: int
    optimizer: int
    gradients: int
    at_peak: Mapping[Use, int]
    most: Mapping[Use, int]
    step: int
    transient: int

    @property
    def kept(self) -> int:
        """Return the bytes that live between two steps."""
        return self.weights + self.optimizer + self.gradients

    @property
    def peak(self) -> int:
        """Return the peak of live bytes."""
        return max(sum(self.at_peak.values()), self.step, self.kept)


@dataclass(frozen=True)
class SimulatedPass:
    """What a simulated pass held.

    All but `largest` grow linearly with the number of equal layers, if each layer is an FSDP unit.

    Attributes:
        weights: bytes of this rank's part, and buffers.
        optimizer: bytes of the state of the optimizer.
        gradients: bytes of this rank's part after the pass.
        trained: bytes of this rank's trained weights.
        largest: bytes of the largest of them.
        by_layer: whether each layer is an FSDP unit; a small model is one as a whole.
        phases: the peak of each phase; those of layers are named (turn, direction, index of the layer).
    """

    weights: int
    optimizer: int
    gradients: int
    trained: int
    largest: int
    by_layer: bool
    phases: Mapping[Hashable, Peak]

    @classmethod
    def of(
        cls, model: PackedModel, live: LiveBytes, trained: Sequence[Tensor], optimizer: int, gradients: int
    ) -> "SimulatedPass":
        """Return what was counted in the pass of a model."""
        sizes = [4 * part.numel() for part in trained]
        by_layer = all(isinstance(layer, FSDPModule) for layer in own_layers(model))
        largest, kept = max(sizes, default=0), live.now["weights"]
        return cls(kept, optimizer, gradients, sum(sizes), largest, by_layer, live.phases)

    def with_layers(self, longer: "SimulatedPass", repetition: Repetition) -> "SimulatedPass | None":
        """Return the pass of the model with all layers; None if shorter models don't tell what it holds.

        Args:
            longer: the pass of the model with one repetition more than this one's.
            repetition: what is left out here.
        """

        def grown(one: int, other: int) -> int:
            return one + repetition.times * (other - one)

        phases = extrapolate(self.phases, longer.phases, repetition)
        # At the end of the backward pass of a small model, all weights are freed and all gradients reduced at once.
        if phases is None or not self.by_layer:
            return None
        names = ("weights", "optimizer", "gradients", "trained")
        sums = {name: grown(vars(self)[name], vars(longer)[name]) for name in names}
        return SimulatedPass(**sums, largest=longer.largest, by_layer=True, phases=phases)

    def memory(self, settings: Optimizer | None, offload: Offload) -> ModelMemory:
        """Return the memory of the role; `settings` are None for one that isn't trained."""
        peak, kept = highest(self.phases), self.weights + self.gradients + self.optimizer
        at_peak: dict[Use, int] = {**peak.at_peak, **({} if settings is None else {"optimizer": self.optimizer})}
        step = 0 if settings is None else kept + step_bytes(self.trained, self.largest, settings, offload)
        return ModelMemory(
            self.weights, self.optimizer, self.gradients, at_peak, dict(peak.most), step, transient=peak.transient
        )


def simulate_update(
    model: PackedModel,
    microbatch: SimulatedMicrobatch,
    settings: Optimizer,
    *,
    several: bool,
    entropy: bool,
    device: str,
) -> SimulatedPass:
    """Simulate an optimizer step, and return what it holds.

    Args:
        model: on the meta device, split over the ranks of a process group (`call_on_fake_rank`), and not used
            afterwards.
        microbatch: size of every microbatch of the step.
        settings: settings of the optimizer.
        several: whether the step has several microbatches, whose gradients are added up.
        entropy: whether entropies are computed, too.
        device: `cpu` or `cuda`, whose kernels are simulated.
    """
    trained = [local_part(weight) for weight in model.parameters() if weight.requires_grad]
    with kernels_of(device), FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        _allocate(model, live)
        model.train()
        turns = list(pipeline_turns(_num_microbatches(model.stage, several), model.stage))
        losses = defaultdict[int, deque[Tensor]](deque)
        for number, (direction, _, virtual) in enumerate(turns, 1):
            if direction == "forward":
                with live.using("activations"), model.virtual_stage(virtual), _layers_as_phases(model, live, number):
                    losses[virtual].append(_forward(model, microbatch, live, entropy=entropy))
            else:
                set_gradient_sync(model, last=number == len(turns))
                live.begin((number, "backward"))
                with live.using("output_layer"):
                    losses[virtual].popleft().backward()
                live.end_backward()
                for tensor in model.stage.on_the_way() if model.stage is not None else ():
                    live.count(tensor, "activations")
        if model.stage is not None:
            model.stage.settle()
        for weight in model.parameters():
            if weight.grad is not None:  # that of the output layer is complete before the layers' backward pass
                live.count(local_part(weight.grad), "gradients")
        state = sum(optimizer_bytes(part, settings) for part in trained)
        return SimulatedPass.of(model, live, trained, state, live.now["gradients"])


def _num_microbatches(stage: StageLink | None, several: bool) -> int:
    """Return how many microbatches a step needs to reach its peak memory.

    A pipeline's plan has as many microbatches as stages, and usually more.
    """
    if stage is None:
        return 1 + several
    return stage.num_stages + 1 if stage.num_virtual == 1 else 2 * stage.num_stages


def simulate_forward(
    model: PackedModel, microbatch: SimulatedMicrobatch, *, entropy: bool = False, device: str
) -> SimulatedPass:
    """Simulate a forward pass without gradients; arguments are those of `simulate_update`."""
    with kernels_of(device), FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live, torch.no_grad():
        _allocate(model, live)
        model.eval()
        with _layers_as_phases(model, live, 1):
            _forward(model, microbatch, live, entropy=entropy)
        reshard(model)
        return SimulatedPass.of(model, live, [], 0, 0)


def with_forward(update: ModelMemory, forward: ModelMemory) -> ModelMemory:
    """Return the memory of a trained role whose passes without gradients have their own microbatches.

    While such a pass runs, the gradients of the last step and the optimizer's state are kept.
    """
    update = replace(update, transient=max(update.transient, forward.transient))
    passes: dict[Use, int] = {**forward.at_peak, "optimizer": update.optimizer, "gradients": update.gradients}
    if sum(passes.values()) <= sum(update.at_peak.values()):
        return update
    return replace(update, at_peak=passes, most=Counter(update.most) | Counter(forward.most))


def optimizer_bytes(part: Tensor, settings: Optimizer) -> int:
    """Return the bytes of the optimizer's state for a rank's part of a weight: two moments."""
    size = part.numel()
    if settings.name == "adamw_8bit" and size >= _LEAST_8BIT and size % _BLOCK == 0:
        return 2 * (size + 4 * size // _BLOCK)
    return 8 * size


def step_bytes(trained: int, largest: int, settings: Optimizer, offload: Offload) -> int:
    """Return the bytes of the temporary tensors of an optimizer step, in fp32.

    AdamW on many weights at once holds the square roots of all second moments. With moments in host memory, it runs
    bucket by bucket, and holds a bucket's moments and the roots of its second moments. With 8-bit moments, it holds
    about four tensors of the size of the largest weight. The fused step on CPUs holds none.

    Args:
        trained: bytes of this rank's trained weights.
        largest: bytes of the largest of them.
        settings: settings of the optimizer.
        offload: what is kept in host memory.
    """
    if settings.name == "adamw_8bit":
        return 4 * largest
    if offload == "parameters":
        return 0
    return min(trained, max(BUCKET_BYTES // 2, largest)) * 3 if offload == "optimizer" else trained


def _allocate(model: PackedModel, live: LiveBytes) -> None:
    """Replace weights and buffers on the meta device by fake tensors of a CPU, and count them."""
    allocate(model, "cpu")
    if model.expert_split is not None:
        model.expert_split.is_balanced = True
    for tensor in (*model.parameters(), *model.buffers()):
        live.count(local_part(tensor), "weights")


def _forward(model: PackedModel, microbatch: SimulatedMicrobatch, live: LiveBytes, *, entropy: bool) -> Tensor:
    """Return a number that depends on the outputs for all tokens, f32 []; its backward pass sets `live.use`."""

    def run() -> Tensor:
        with live.using("activations"):
            inputs = microbatch.inputs()
            hidden = model.hidden_states(inputs, model.row_part(inputs))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: _start_backward(live))
        with live.using("output_layer"):
            return _outputs(model, hidden, entropy=entropy)

    # FSDP2's hooks run with a module's call; `model.run` would have ranks of tensor parallelism keep all tokens.
    cast(Any, model).forward = run
    return model()


def _start_backward(live: LiveBytes) -> None:
    """Note that the backward pass of the output layer has ended, and that of the layers begins."""
    live.use = "backward"


@contextmanager
def _layers_as_phases(model: PackedModel, live: LiveBytes, turn: int) -> Iterator[None]:
    """Count what each layer does in a forward pass that begins inside the context, and in its backward pass, as phases.

    A phase lasts until the next one, so that of the last layer has what follows it, too.
    """

    def before(index: int, *_: Any) -> None:
        live.begin((turn, "forward", index))

    def after(index: int, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: live.begin((turn, "backward", index)))

    handles: list[RemovableHandle] = []
    for index, layer in enumerate(own_layers(model)):
        handles.append(layer.register_forward_pre_hook(partial(before, index)))
        handles.append(layer.register_forward_hook(partial(after, index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _outputs(model: PackedModel, hidden: Tensor, *, entropy: bool) -> Tensor:
    """Return the sum of a model's outputs for hidden states [T, d]."""
    if not model.has_outputs:
        return model.placeholders(hidden, 1).sum()
    if isinstance(model, ScalarHeadModel):
        return model.head(hidden).float().sum()
    labels = torch.zeros(len(hidden), dtype=torch.int64)
    logprobs, entropies = cast(Policy, model).score_states(hidden.index_select(0, labels), labels, entropy=entropy)
    return logprobs.sum() + entropies.sum()

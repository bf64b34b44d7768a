"""Trace a generate call: the functions of rlpack between a recipe and its generation engine.

    python -m benchmarks.generate_path

Runs the recipes' `generate` stage on one rank of a local Ray cluster. On the driver, a profile function records the
stack as the call leaves for the rank; on the rank, the engine records the stack in which it is called. The path is
both stacks, outermost function first, without the functions of Ray and Python.
"""

import argparse
import functools
import inspect
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self, cast

import numpy as np
from rich.console import Console as RichConsole
from transformers import PreTrainedTokenizerBase

from rlpack.batch.ragged import Ragged
from rlpack.config.roles import builtin_roles, longest_rollout
from rlpack.config.schema import Config, Data, Model, Placement, Pool, Rollout, Trainer
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.start_roles import start_roles
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.observe.console import Console
from rlpack.observe.run import Run
from rlpack.recipes.driver.rollout_stages import draw_prompts, generate
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.splits import cache_splits, load_splits
from rlpack.rollout.canary import canary_tolerance
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import Generations, SamplingParams
from rlpack.worker import RankContext, rank_zero
from rlpack.workers.rollout import RolloutWorker

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlpack", "workers", "recipes")
MODEL = Model(
    config={
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
    }
)


class TracedEngine(HFEngine):
    """The `hf` engine; it records the stack in which it generates.

    Attributes:
        path: functions of rlpack on the rank's stack, outermost first; empty before the first call.
    """

    path: tuple[str, ...] = ()

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        """Record the caller's stack, then generate."""
        frame = inspect.currentframe()
        assert frame is not None
        self.path = functions_of(frame.f_back)
        return super().generate(prompts, params, seeds)


class TracedRollout(RolloutWorker):
    """The rollout role with an engine that records its stack."""

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Build the role around a `TracedEngine`."""
        engine = TracedEngine.from_settings(
            config.model,
            config.rollout,
            tokenizer,
            device=context.torch_device,
            seed=config.seed,
            max_length=longest_rollout(config),
        )
        return cls(context, engine, tokenizer, canary_tolerance=canary_tolerance(engine.dtype))

    @rank_zero
    def path(self) -> tuple[str, ...]:
        """Return the functions on the stack of the engine's last `generate`."""
        assert isinstance(self._engine, TracedEngine)
        return self._engine.path


def generate_path(session: Session) -> list[str]:
    """Return the functions that a generate call passes, from the recipe's call to the engine's `generate`.

    The first is the stage that a recipe calls, the last is the role's method that calls the engine. Functions that have
    returned by then, such as the planner, are not on the path.
    """
    step = session.begin_step(1)
    with step.lease:
        draw = draw_prompts(session, step)
        with _calls_sent("generate") as sent:
            generate(session, step, draw)
        on_rank = cast(WorkerGroup[TracedRollout], session.rollout).run(TracedRollout.path)
    assert len(sent) == session.rollout.num_ranks == 1, "one rank generates, in one call"
    return [*sent[0], *on_rank]


def functions_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return rlpack's functions on the stack that ends with `frame`, outermost first, as `file:name`."""
    names = []
    while frame is not None:
        if place := _place(frame.f_code):
            names.append(place)
        frame = frame.f_back
    return tuple(reversed(names))


@contextmanager
def traced_session(folder: Path) -> Iterator[Session]:
    """Start Ray and the rollout role on one rank, and yield a session that can generate."""
    roles = builtin_roles()
    roles["rollout"] = roles["rollout"].model_copy(update={"target": "benchmarks.generate_path:TracedRollout"})
    config = Config(
        model=MODEL,
        data=Data(generator={"train_size": 8, "validation_size": 2}),
        rollout=Rollout(max_new_tokens=2),
        trainer=Trainer(prompts_per_step=2, group_size=2),
        placement=Placement(pools={"main": Pool(ranks=1, cpus_per_rank=0.5)}),
        roles=roles,
        run_dir=str(folder),
    )
    tokenizer, *splits = load_splits(config)
    run = Run.start(config, folder, console=Console(RichConsole(quiet=True)))
    with run, Cluster(config.placement) as cluster:
        groups = start_roles(cluster, config, ["rollout"], (config, tokenizer))
        train, held_out = cache_splits(cluster.store, tokenizer, *splits)
        yield Session(config, run, tokenizer, train, held_out, groups, cluster.store)


def traced_path() -> list[str]:
    """Return the path of a generate call on a Ray cluster that is started for it."""
    with tempfile.TemporaryDirectory() as folder, traced_session(Path(folder) / "run") as session:
        return generate_path(session)


@contextmanager
def _calls_sent(method: str) -> Iterator[list[tuple[str, ...]]]:
    """Collect the driver's stack at each call of a role's `method` that is handed to Ray for a rank."""
    stacks: list[tuple[str, ...]] = []
    thread = threading.get_ident()

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or threading.get_ident() != thread:
            return
        leaves = _place(frame.f_code) is None and _place(caller.f_code) is not None and frame.f_code.co_name == "remote"
        if leaves and method in frame.f_locals.get("args", ()):
            stacks.append(functions_of(caller))

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield stacks
    finally:
        sys.setprofile(previous)


def _place(code: CodeType) -> str | None:
    """Return `file:name` of a function of rlpack, None for any other."""
    file = _file(code.co_filename)
    return None if file is None else f"{file}:{code.co_qualname}"


@functools.cache
def _file(name: str) -> str | None:
    """Return the path of a file of rlpack from the root, None for any other; called for every function call."""
    path = Path(name).resolve()  # workers and recipes are reached through links, too
    if not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(ROOT)
    return str(inside) if inside.parts[0] in PACKAGES else None


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for number, function in enumerate(traced_path(), 1):
        print(f"{number:3} {function}")

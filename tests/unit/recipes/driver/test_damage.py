"""Damages to the files of a run directory: what is loaded afterwards is bit for bit what was saved, or nothing.

The run is real but for its cluster: one process has the actor, and steps are changes of its weights and moments.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rlpack.batch.errors import DataError
from rlpack.batch.store import LocalStore
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Algorithm, Config, Model, SFTWarmup, Trainer
from rlpack.distributed.context import RankContext
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.restarts import Restarts
from rlpack.gloo import GLOO
from rlpack.observe import run_lock
from rlpack.observe.console import Sample
from rlpack.observe.errors import RunDirectoryError
from rlpack.observe.run import Run
from rlpack.observe.run_lock import Owner
from rlpack.observe.sinks import read_records
from rlpack.packing import Batching, make_plan
from rlpack.recipes.driver import open_session as opening
from rlpack.recipes.driver.open_session import open_session
from rlpack.recipes.driver.policy_stages import initialize_reference
from rlpack.recipes.driver.progress import Phase, Progress
from rlpack.recipes.driver.reference_policy import reference_model
from rlpack.recipes.driver.session import Session
from rlpack.startup.same_run import check_resumed
from rlpack.workers.actor import ActorWorker
from tests.builders import MODEL, tiny_config, tiny_tokenizer
from tests.unit.recipes.driver.sessions import DATA, AnsweringGroup

# `make test-long` runs more.
DAMAGES = int(os.environ.get("RLPACK_DAMAGES", "60"))
REFUSALS = (CheckpointError, ConfigError, DataError, RunDirectoryError)
State = dict[str, Tensor]


@dataclass
class World:
    """The actor of all runs of this file, and what its runs have saved.

    Attributes:
        actor: its weights and moments are overwritten by every run.
        original: a finished run, never damaged itself.
        run_dir: where it was done, and where copies of it are damaged.
        saved: weights and moments at each checkpoint.
        reference: weights that the recipe's own steps began with.
        loaded_reference: folders that the reference has loaded.
    """

    actor: ActorWorker
    original: Path
    run_dir: Path
    saved: dict[tuple[Phase, int], State]
    reference: State = field(default_factory=dict)
    loaded_reference: list[str] = field(default_factory=list)

    def state(self) -> State:
        """Return copies of weights and moments."""
        policy, optimizer = self.actor._scorer.policy, self.actor._stepper._optimizer
        moments = {
            f"{name} {key}": value.full_tensor() if key != "step" else value
            for name, weight in policy.named_parameters()
            for key, value in optimizer.state[weight].items()
        }
        weights = {name: weight.full_tensor() for name, weight in policy.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in (weights | moments).items()}

    def change(self, seed: int) -> None:
        """Change every weight and moment, as a step does."""
        torch.manual_seed(seed)
        policy, optimizer = self.actor._scorer.policy, self.actor._stepper._optimizer
        with torch.no_grad():
            for weight in policy.parameters():
                moments = optimizer.state[weight]
                for tensor in (weight, moments["exp_avg"], moments["exp_avg_sq"]):
                    local = tensor.to_local()
                    local.add_(torch.randn(local.shape))
                moments["step"] += 1

    def groups(self) -> dict[str, AnsweringGroup]:
        """Return the roles of a session: the actor, and a reference that records what it loads."""
        actor = self.actor
        methods = {
            name: getattr(actor, name)
            for name in ("save", "load", "export_model", "export_reference", "reset_optimizer")
        }
        answers = {"actor": methods, "reference": {"load_model": self.loaded_reference.append}}
        return {role: AnsweringGroup(role, Batching(), methods) for role, methods in answers.items()}

    def restart(self) -> None:
        """Put an intact run directory in its place."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
        shutil.copytree(self.original, self.run_dir)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Check what the command checks first, and open a session as a recipe does."""
        self.loaded_reference.clear()
        check_resumed(config_of(self.run_dir))
        with open_session(config_of(self.run_dir)) as session:
            yield session


def config_of(run_dir: Path) -> Config:
    return tiny_config(
        data=DATA,
        model=Model(config=MODEL | {"num_hidden_layers": 1}),
        run_dir=str(run_dir),
        resume="auto",
        algorithm=Algorithm(kl_coef=0.1),
        trainer=Trainer(prompts_per_step=4),
        sft_warmup=SFTWarmup(steps=2, batch_size=2),
    )


@contextmanager
def no_cluster(*arguments: Any, **named: Any) -> Iterator[Any]:
    yield SimpleNamespace(store=LocalStore(), restarts=Restarts(), ray_logs=None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("damage")
    dist.init_process_group(GLOO, init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
    actor = ActorWorker.from_settings(
        RankContext("main", 0, ParallelLayout()), config_of(folder / "run"), tiny_tokenizer()
    )
    world = World(actor, folder / "original", folder / "run", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "Cluster", no_cluster)
        patch.setattr(opening, "start_roles", lambda *arguments, **settings: world.groups())
        patch.setattr(Run, "_report", lambda run: None)  # drawing takes a second
        patch.setattr(run_lock, "WATCH_S", 0.02)
        train(world)
        yield world
    dist.destroy_process_group()


def train(world: World) -> None:
    """Do the run: two steps of warm-up and three of the recipe, saved after each."""
    with world.session() as session:
        for phase, steps in (("sft_warmup", 2), ("train", 3)):
            session.progress = replace(session.progress, phase=phase, step=0)
            if phase == "train":
                initialize_reference(session)
                world.reference = load_file(reference_model(world.run_dir) / "model.safetensors")
            for step in range(1, steps + 1):
                world.change(step + 10 * (phase == "train"))
                session.progress = replace(session.progress, step=step, optimizer_steps=step)
                session.run.record_plan(make_plan([3, 4], Batching(), dp_size=1))
                session.run.log_samples([Sample("1+1=", "2", "2", 1.0)])
                session.run.log(step, {"reward/mean": step / 7}, phase=phase)
                session.save()
                world.saved[phase, step] = world.state()
    owner = replace(Owner.this_process(), process_start=1)  # of a killed process
    (world.run_dir / "run.lock").write_text(json.dumps(asdict(owner)))
    world.run_dir.rename(world.original)


def files(run_dir: Path) -> list[Path]:
    return sorted(path for path in run_dir.rglob("*") if path.is_file())


def damage(run_dir: Path, generator: random.Random) -> str:
    """Damage one file, and say how."""
    kind = generator.choice(("flip", "flip", "cut", "swap", "delete", "older", "wrong step"))
    paths = [path for path in files(run_dir) if path.stat().st_size]
    if kind == "older":  # an older file in the place of a newer one of the same name
        paths = [path for path in paths if "step-" in str(path) and siblings(path)]
    path = generator.choice(paths)
    name, content = path.relative_to(run_dir), bytearray(path.read_bytes())
    match kind:
        case "flip":
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[: generator.randrange(len(content))])
        case "swap":
            other = generator.choice([one for one in paths if one != path])
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return f"swap {name} and {other.relative_to(run_dir)}"
        case "delete":
            path.unlink()
        case "older":
            other = generator.choice(siblings(path))
            path.write_bytes(other.read_bytes())
            return f"{name} from {other.relative_to(run_dir)}"
        case _:
            folder = generator.choice(sorted(run_dir.glob("checkpoints/*/step-*")))
            target = folder.with_name(f"step-{generator.choice([n for n in range(9) if folder.name != f'step-{n}'])}")
            if target.exists():
                shutil.rmtree(target)
            return f"rename {folder.relative_to(run_dir)} to {folder.rename(target).name}"
    return f"{kind} {name}"


def siblings(path: Path) -> list[Path]:
    """Return the files of the same name in other checkpoints."""
    parts = path.parts
    at = next(index for index, part in enumerate(parts) if part.startswith("step-"))
    folders = Path(*parts[: at - 1]).glob("*/step-*")
    others = [folder.joinpath(*parts[at + 1 :]) for folder in folders]
    return [other for other in others if other != path and other.exists()]


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_records(run_dir / "metrics.jsonl"))


def samples(run_dir: Path) -> str:
    path = run_dir / "samples.jsonl"
    return path.read_text(errors="replace") if path.exists() else ""


def resume(world: World, log: Callable[[], str]) -> str:
    """Resume the run and return the outcome, after checking that what was loaded is what was saved."""
    world.change(99)
    run_dir = world.run_dir
    try:
        with world.session() as session:
            progress = session.progress
            assert progress != Progress(), "it starts over in a run directory that holds checkpoints"
            at = progress.phase, progress.step
            assert same(world.state(), world.saved[at]), f"what was loaded isn't what was saved at {at}"
            if at[0] == "train":
                initialize_reference(session)
                assert world.loaded_reference == [str(reference_model(run_dir))]
                assert same(load_file(reference_model(run_dir) / "model.safetensors"), world.reference)
            covered = [record for record in records(world.original) if before(record, at)]
            lines = [line for line in samples(world.original).splitlines(True) if before(json.loads(line), at)]
            intact = records(run_dir) == covered and samples(run_dir) == "".join(lines)
            assert intact or "changed after the checkpoint was written" in log(), "records differ silently"
            if at == ("train", 3):
                return "rebuilt" if "rebuilding it from" in log() else "newest"
            assert "is skipped: " in log(), "an older checkpoint was used silently"
            return "older"
    except REFUSALS as error:
        return "refused" if str(run_dir) in str(error) else repr(error)


def before(record: dict[str, Any], at: tuple[Phase, int]) -> bool:
    order = {"sft_warmup": 0, "train": 1}
    return (order[record["phase"]], record["step"]) <= (order[at[0]], at[1])


def test_an_intact_run_resumes_from_its_newest_checkpoint_without_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
):
    world.restart()
    assert resume(world, lambda: caplog.text) == "newest"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in warnings if "taking it over" not in text] == []
    kinds = {path.name.partition(".")[0] for path in files(world.original)}
    assert {"metrics", "samples", "config", "packing", "run", "latest", "state", "manifest", "model"} <= kinds


@pytest.mark.parametrize("part", range(4))
def test_random_damages_never_load_silently(world: World, caplog: pytest.LogCaptureFixture, part: int):
    outcomes: dict[str, list[str]] = {}
    for number in range(part, DAMAGES, 4):
        generator = random.Random(number)
        world.restart()
        done = [damage(world.run_dir, generator) for _ in range(generator.choice((1, 1, 1, 2, 4)))]
        caplog.clear()
        try:
            outcome = resume(world, lambda: caplog.text)
        except BaseException as error:
            error.add_note(f"damage {number}: {'; '.join(done)}")
            raise
        outcomes.setdefault(outcome, []).append(f"{number}: {'; '.join(done)}")
    assert outcomes.keys() <= {"newest", "older", "rebuilt", "refused"}, outcomes
    assert len(outcomes.keys()) > 1

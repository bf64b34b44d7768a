import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from rlpack import __version__
from rlpack.batch.errors import DataError
from rlpack.checkpoint.commit import new_checkpoint
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Actor, Algorithm, Config, Data, Evaluation, EvaluationSet, Placement, Pool, Trainer
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.config.sections.parallelism import Parallel
from rlpack.data.prompts import Prompts
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.resume import LoadedCheckpoint, check_same_prompts, newest_checkpoint
from rlpack.recipes.driver.splits import load_splits
from rlpack.startup.same_run import check_same_run
from tests.builders import tiny_config


def test_a_kl_term_needs_the_policy_that_the_recipe_began_with():
    saved = Config().model_dump(mode="json")
    config = Config(algorithm=Algorithm(kl_coef=0.1), run_dir="runs/a")
    check_same_run(saved, config, has_reference=True)
    check_same_run(saved, Config(), has_reference=False)
    with pytest.raises(ConfigError, match=r"algorithm\.kl_coef is 0\.1, but run_dir=runs/a has no reference"):
        check_same_run(saved, config, has_reference=False)


@pytest.mark.parametrize(("given", "adapted"), [(0.1, 0.0123), (0.5, None)])
def test_an_adapted_kl_coefficient_is_kept_unless_another_one_is_given(given: float, adapted: float | None):
    saved = Config(algorithm=Algorithm(kl_coef=0.1, kl_target=5.0)).model_dump(mode="json")
    progress = Progress("train", step=7, kl_coef=0.0123)
    checkpoint = LoadedCheckpoint(Path("step-7"), {"config": saved, "progress": asdict(progress)})
    config = Config(algorithm=Algorithm(kl_coef=given, kl_target=5.0))
    assert checkpoint.progress_with(config) == replace(progress, kl_coef=adapted)


def test_another_seed_makes_another_run():
    with pytest.raises(ConfigError, match=r"seed is 2 and the checkpoint in run_dir=None was written with 1"):
        check_same_run(Config().model_dump(mode="json"), Config(seed=2))


@pytest.mark.parametrize(
    ("actor", "key"),
    [
        (Actor(lora=Lora(rank=4)), "actor.lora.rank is 4 and the checkpoint in run_dir=None was written with 0"),
        (Actor(optimizer=Optimizer(freeze=("*.bias",))), "actor.optimizer.freeze is"),
        (Actor(optimizer=Optimizer(no_decay=("*.bias",))), "actor.optimizer.no_decay is"),
        (Actor(optimizer=Optimizer(name="adamw_8bit")), "actor.optimizer.name is 'adamw_8bit'"),
    ],
)
def test_what_is_trained_and_by_what_may_not_change_and_rates_may(actor: Actor, key: str):
    saved = Config().model_dump(mode="json")
    with pytest.raises(ConfigError, match=re.escape(key)):
        check_same_run(saved, Config(actor=actor))
    check_same_run(saved, Config(actor=Actor(optimizer=Optimizer(learning_rate=0.1, schedule="cosine", beta1=0.5))))


def test_moments_in_8_bits_stay_on_as_many_ranks():
    def config(optimizer: Literal["adamw", "adamw_8bit"], ranks: int) -> Config:
        placement = Placement(pools={"main": Pool(), "second": Pool(ranks=ranks)}, roles={"actor": "second"})
        return Config(actor=Actor(optimizer=Optimizer(name=optimizer)), placement=placement)

    check_same_run(config("adamw", 2).model_dump(mode="json"), config("adamw", 4))
    saved = config("adamw_8bit", 2).model_dump(mode="json")
    check_same_run(saved, config("adamw_8bit", 2))
    with pytest.raises(ConfigError, match=r"actor is sharded over 4 ranks and .* was written by 2; 8-bit moments"):
        check_same_run(saved, config("adamw_8bit", 4))
    replicas = config("adamw_8bit", 4)
    actor = replicas.actor.model_copy(update={"parallel": Parallel(dp_replicate=2)})
    check_same_run(saved, replicas.model_copy(update={"actor": actor}))
    del saved["actor"]["parallel"]
    check_same_run(saved, config("adamw_8bit", 2))
    actor = replicas.actor.model_copy(update={"parallel": Parallel(tp=2)})
    stages = replicas.actor.model_copy(update={"parallel": Parallel(pp=2)})
    check_same_run(saved, replicas.model_copy(update={"actor": stages}))
    with pytest.raises(ConfigError, match=r"1 rank and .* written by 2; 8-bit"):
        check_same_run(saved, config("adamw_8bit", 2).model_copy(update={"actor": stages}))
    with pytest.raises(ConfigError, match=r"4 ranks with actor.parallel.tp=2 and .* written by 4 with tp=1; 8-bit"):
        check_same_run(replicas.model_dump(mode="json"), replicas.model_copy(update={"actor": actor}))
    actor = replicas.actor.model_copy(update={"parallel": Parallel(ep=4)})
    experts = replicas.model_copy(update={"actor": actor})
    check_same_run(experts.model_dump(mode="json"), experts)
    with pytest.raises(
        ConfigError, match=r"4 ranks with actor.parallel.ep=1 and .* by 4 with ep=4; .*\.tp and \.ep as they were"
    ):
        check_same_run(experts.model_dump(mode="json"), replicas)


def test_a_dataset_that_changed_since_the_checkpoint_is_refused(tmp_path):
    def read(answer: str) -> Prompts:
        file = tmp_path / "rows.jsonl"
        file.write_text(f'{{"prompt": "1+1=", "answer": "{answer}"}}\n')
        return load_splits(tiny_config(data=Data(source=str(file), validation_source=str(file))))[1]

    before, after = read("2"), read("3")
    state = dict.fromkeys(("prompts", "held_out"), before.fingerprint) | {"config": Config().model_dump(mode="json")}
    resumed = LoadedCheckpoint(tmp_path / "step-4", state)
    check_same_prompts(resumed, Config(), read("2"), before)
    with pytest.raises(DataError, match=r"has other rows than when the checkpoint .*step-4 was written; restore them"):
        check_same_prompts(resumed, Config(), after, before)
    with pytest.raises(DataError, match="has other rows"):
        check_same_prompts(resumed, Config(), before, after)
    with pytest.raises(DataError, match=r"step-4 was written, or its chat template or tokenizer has changed, or .*day"):
        check_same_prompts(resumed, Config(), replace(after, dated_by="tokenizer and template"), before)
    examples = [replace(example, columns={"tools": []}) for example in after.examples]
    rendered = Config(data=Data(chat_template=True))
    with pytest.raises(DataError, match="or an earlier version wrote it, which left the column tools out"):
        check_same_prompts(resumed, rendered, replace(after, examples=examples), before)


def test_a_set_that_gives_the_tokenizer_other_characters_is_named(tmp_path):
    for name, prompt in (("train", "1+1="), ("hard", "six minus two=")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    data = Data(source=str(tmp_path / "train.jsonl"), validation_source=str(tmp_path / "train.jsonl"))
    sets = Evaluation(sets={"hard": EvaluationSet(source=str(tmp_path / "hard.jsonl"))})
    without, with_set = tiny_config(data=data), tiny_config(data=data, evaluation=sets)
    _, prompts, held_out = load_splits(without)
    state = {"prompts": prompts.fingerprint, "held_out": held_out.fingerprint}
    resumed = LoadedCheckpoint(tmp_path / "step-4", state | {"config": without.model_dump(mode="json")})
    with pytest.raises(DataError, match=r"other characters than when the checkpoint .*step-4 .* evaluation\.sets has"):
        check_same_prompts(resumed, with_set, *load_splits(with_set)[1:])


@pytest.mark.parametrize(
    ("step", "saved", "now", "at_end", "is_due"),
    [
        *((7, 20, 7, False, True), (7, 20, 20, False, False), (20, 20, 20, True, False), (20, 20, 40, True, False)),
        *((20, 40, 20, False, False), (20, 40, 20, True, True)),  # evaluated after step 20, without the sets of the end
    ],
)
def test_a_step_that_has_become_the_last_one_is_evaluated(
    tmp_path, step: int, saved: int, now: int, at_end: bool, is_due: bool
):
    state = STATE | {
        "progress": asdict(Progress(phase="train", step=step)),
        "config": Config(trainer=Trainer(steps=saved), evaluation=Evaluation(every=10)).model_dump(mode="json"),
    }
    sets = {"test": EvaluationSet(source="test.jsonl", at_end=at_end)}
    config = Config(trainer=Trainer(steps=now), evaluation=Evaluation(every=10, sets=sets))
    for is_logged in (False, True):
        assert LoadedCheckpoint(tmp_path, state).evaluation_is_due(config, is_logged=is_logged) == is_due


def test_an_evaluation_that_is_logged_after_its_checkpoint_is_not_due(tmp_path: Path):
    state = STATE | {"evaluation_is_due": True, "progress": asdict(Progress(phase="train", step=5))}
    checkpoint = LoadedCheckpoint(tmp_path, state)
    assert checkpoint.evaluation_is_due(Config(), is_logged=False)
    assert not checkpoint.evaluation_is_due(Config(), is_logged=True)


STATE: dict[str, Any] = {
    "progress": asdict(Progress(step=1)),
    "config": Config().model_dump(mode="json"),
    "prompts": "a",
    "held_out": "b",
    "reference": None,
    "records": {},
}


def commit(run_dir: Path, phase: str, step: int, index: bytes | None = None, **changes: Any) -> Path:
    state = {key: value for key, value in (STATE | changes).items() if value != "missing"}
    with new_checkpoint(run_dir / "checkpoints" / phase, step) as staging:
        if index is not None:
            (staging.path / "actor").mkdir()
            (staging.path / "actor" / ".metadata").write_bytes(index)
        staging.commit(state)
    return run_dir / "checkpoints" / phase / f"step-{step}"


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(tmp_path):
    sft_warmup, first, second = (commit(tmp_path, *at) for at in (("sft_warmup", 9), ("train", 1), ("train", 2)))
    for folder in (first, second):
        (folder / "state.json").unlink()
    error = r"newest, .*/train/step-2, is damaged: state\.json is missing; restore"
    with pytest.raises(CheckpointError, match=error):  # though the warm-up's is intact: training would start over
        newest_checkpoint(tmp_path)
    (sft_warmup / "COMMITTED").write_text("half")
    with pytest.raises(CheckpointError, match=error):
        newest_checkpoint(tmp_path)


def test_a_run_that_was_killed_in_its_first_save_after_the_warm_up_continues_from_the_warm_up(tmp_path):
    sft_warmup = commit(tmp_path, "sft_warmup", 9)
    (commit(tmp_path, "train", 1) / "COMMITTED").unlink()
    resumed = newest_checkpoint(tmp_path)
    assert resumed is not None
    assert resumed.path == sft_warmup


def test_a_run_that_was_killed_in_its_first_save_starts_over(tmp_path):
    (commit(tmp_path, "train", 1) / "COMMITTED").unlink()
    (tmp_path / "checkpoints" / "train" / ".tmp-2-ab").mkdir()
    assert newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"held_out": "missing"},
        {"progress": asdict(Progress()) | {"tokens": 3}},
        {"progress": {"step": 3}},
        {"config": {"seed": 1}},
    ],
)
def test_a_state_with_other_fields_is_refused_by_its_version(tmp_path: Path, changes: dict[str, Any]):
    commit(tmp_path, "train", 1)
    folder = commit(tmp_path, "train", 2, **changes)
    with pytest.raises(
        CheckpointError, match=rf"{folder} has other fields .*written by rlpack {re.escape(__version__)}"
    ):
        newest_checkpoint(tmp_path)


def test_a_checkpoint_that_would_run_code_is_refused_before_anything_starts(tmp_path: Path):
    commit(tmp_path, "train", 1)
    commit(tmp_path, "train", 2, index=b"cos\nmkdir\n(S'" + str(tmp_path / "mark").encode() + b"'\ntR.")
    with pytest.raises(CheckpointError, match=r"step-2/actor/\.metadata contains os\.mkdir, which no checkpoint"):
        newest_checkpoint(tmp_path)
    assert not (tmp_path / "mark").exists()

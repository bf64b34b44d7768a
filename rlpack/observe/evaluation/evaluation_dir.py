"""The directory of an evaluation, and the arguments and data that its rows belong to.

<output_dir>/evaluation.json   arguments by key, and hashes of prompts, model, tokenizer, reward functions and roles
<output_dir>/samples.jsonl     one response per line
<output_dir>/engines.json      number of engine failures; only if there were any
<output_dir>/samples.html      the responses, for reading
<output_dir>/results.json      statistics
"""

import glob
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlpack.config.redaction import without_secrets
from rlpack.config.roles import pool_of
from rlpack.config.schema import Config
from rlpack.observe.errors import EvaluationError
from rlpack.observe.run_dir import LOCK, LOG, flat, holds_run
from rlpack.whole_files import write_whole

IDENTITY, RESULTS, PAGE, ROWS = "evaluation.json", "results.json", "samples.html", "samples.jsonl"
# The folder of a checkpoint's model while it is evaluated. It is deleted afterwards, so no user's folder may have this
# name.
EXPORTED = ".rlpack-exported-checkpoint"
ENGINES = "engines.json"
_FORMAT = 2
# Maximum number of differences that a message lists.
_SHOWN = 3
_SECTIONS = ("seed", "model", "data", "reward", "rollout", "evaluate")
# Keys of these sections that change no row: keys of statistics, which are computed from the rows whenever the command
# runs; limits beyond which a row is repeated or the command ends; and keys of training.
_UNUSED = {
    *("evaluate.output_dir", "evaluate.threshold", "evaluate.pass_at", "evaluate.resamples"),
    *("rollout.request_timeout_s", "rollout.kv_cache_gb", "rollout.sleep_level", "rollout.max_logprob_gap"),
    *("rollout.publish", "rollout.kv_cache"),
    *("reward.batch_timeout_s", "reward.max_failures", "reward.processes", "reward.rows_per_call"),
    *("judge.api_key_env", "judge.concurrency", "judge.timeout_s", "judge.retries", "judge.backoff_s"),
    *("judge.max_failures", "data.split", "data.fraction"),
}
_HARMLESS = {LOCK, LOG, EXPORTED}


@dataclass(frozen=True)
class EngineFailures:
    """Counts of engine failures in an evaluation.

    Attributes:
        repeated_rows: responses that were generated again.
        engines_replaced: engines that were replaced.
    """

    repeated_rows: int = 0
    engines_replaced: int = 0

    @classmethod
    def read(cls, folder: Path) -> "EngineFailures":
        """Return the counts of an evaluation so far.

        Raises:
            EvaluationError: the file can't be read.
        """
        try:
            return cls(**json.loads((folder / ENGINES).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError) as error:
            raise EvaluationError(f"{folder / ENGINES} can't be read: {error}; delete it to count from 0") from error

    def add_to(self, folder: Path) -> None:
        """Add the counts of one part to the evaluation's; call this before the part's rows are written."""
        if self != EngineFailures():
            earlier = EngineFailures.read(folder)
            rows, engines = earlier.repeated_rows + self.repeated_rows, earlier.engines_replaced + self.engines_replaced
            write_json(folder / ENGINES, asdict(EngineFailures(rows, engines)))


def arguments_of(config: Config) -> dict[str, Any]:
    """Return the settings that the rows of an evaluation depend on, by dotted key.

    The ranks and their devices and cores are among them: they determine which rows are generated together, and how
    sums are rounded.
    """
    values = without_secrets(config.model_dump(mode="json"))
    sections = {name: values[name] for name in _SECTIONS}
    if config.judge.url is not None:  # the reward role calls a server
        sections["judge"] = values["judge"]
    sections["roles"] = {name: values["roles"][name] for name in ("rollout", "reward")}
    pool = pool_of(config, "rollout")
    ranks = config.placement.pools[pool].model_dump(include={"ranks", "gpus_per_rank", "cpus_per_rank"})
    placed = {f"placement.pools.{pool}.{name}": value for name, value in ranks.items()}
    return {key: value for key, value in flat(sections).items() if key not in _UNUSED} | placed


def default_output_dir(config: Config, name: str) -> Path:
    """Return `evaluations/<name>-<hash>`, the same for the same arguments."""
    digest = sha256(json.dumps(arguments_of(config), sort_keys=True).encode()).hexdigest()
    return Path("evaluations") / f"{name}-{digest[:8]}"


def other_evaluation(folder: Path, arguments: Mapping[str, Any]) -> str | None:
    """Describe how a new evaluation differs from one of the same model next to it; None if there is none.

    Args:
        folder: a default directory.
        arguments: the evaluation's arguments by dotted key.
    """
    if (folder / IDENTITY).exists():
        return None
    prefix = folder.name.rpartition("-")[0]
    others: list[tuple[list[str], str]] = []
    for path in sorted(folder.parent.glob(f"{glob.escape(prefix)}-*/{IDENTITY}")):
        try:
            before = read_identity(path.parent)["arguments"]
        except EvaluationError:  # damaged, or of another version: not an evaluation to continue
            continue
        if before.get("model.path") == arguments["model.path"]:
            others.append((differences(before, arguments), path.parent.name))
    if not others:
        return None
    differing, name = min(others, key=lambda other: len(other[0]))
    shown = differing[:_SHOWN] + [f"and {len(differing) - _SHOWN} more"] * (len(differing) > _SHOWN)
    return f"a new evaluation; that in {folder.parent / name} has other arguments: {'; '.join(shown)}"


def check_output_dir(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Check, without creating anything, that an evaluation with these arguments can use the directory.

    Raises:
        EvaluationError: it is a file, can't be written, holds a run or unrelated files, or an evaluation with other
            arguments.
    """
    shown = f"evaluate.output_dir is {str(folder)!r}"
    try:
        entries = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        entries = []
    except (OSError, ValueError) as error:  # a file, or a name that no directory can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise EvaluationError(f"{shown}, which can't be a directory ({reason}); choose another") from error
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise EvaluationError(f"{shown}, which can't be written (no permission in {nearest}); choose another")
    if IDENTITY in entries:
        _refuse(f"{shown}, which holds an evaluation", differences(read_identity(folder)["arguments"], arguments))
    elif holds_run(folder):
        raise EvaluationError(f"{shown}, which holds a run; choose another, or a folder below it")
    elif unrelated := [name for name in entries if name not in _HARMLESS]:
        raise EvaluationError(
            f"{shown}, which has unrelated files ({', '.join(unrelated[:3])}{', …' * (len(unrelated) > 3)}); choose "
            "another, or a folder below it"
        )


def open_evaluation(folder: Path, arguments: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Write the evaluation's identity, or check that the directory has the same one.

    Args:
        folder: an existing directory whose lock this process holds.
        arguments: the arguments by dotted key.
        hashes: hashes of what the arguments name, such as the model, by name.

    Raises:
        EvaluationError: names what differs.
    """
    if not (folder / IDENTITY).exists():
        document = {"format": _FORMAT, "arguments": dict(arguments), "hashes": dict(hashes)}
        write_json(folder / IDENTITY, document)
        return
    shown, before = f"evaluate.output_dir is {str(folder)!r}, which holds an evaluation", read_identity(folder)
    _refuse(shown, differences(before["arguments"], arguments))
    changed = sorted(name for name, digest in hashes.items() if before["hashes"].get(name) != digest)
    if changed:
        raise EvaluationError(
            f"{shown} that began with other files of the {' and the '.join(changed)}; restore them, or choose another "
            "directory"
        )


def read_identity(folder: Path) -> dict[str, Any]:
    """Return the identity of the evaluation in a directory.

    Raises:
        EvaluationError: it can't be read, or another version wrote it.
    """
    path = folder / IDENTITY
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(
            f"{path} can't be read ({error}); restore it, or choose another evaluate.output_dir"
        ) from error
    if (
        not isinstance(document, dict)
        or document.get("format") != _FORMAT
        or not all(isinstance(document.get(name), dict) for name in ("arguments", "hashes"))
    ):
        raise EvaluationError(
            f"{path} is not in the format of this version of rlpack; choose another evaluate.output_dir"
        )
    return document


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return each argument that differs, with both values.

    >>> differences({"seed": 1}, {"seed": 2})
    ['seed is 2 and was 1']
    """
    return list(_differences(before, now))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(before.keys() | now.keys()):
        if key not in now:
            yield f"{key} is not set and was {before[key]!r}"
        elif key not in before:
            yield f"{key} is {now[key]!r} and was not set"
        elif before[key] != now[key]:
            yield f"{key} is {now[key]!r} and was {before[key]!r}"


def _refuse(shown: str, differing: list[str]) -> None:
    """Raise if an evaluation differs from the one that a directory holds."""
    if differing:
        raise EvaluationError(
            f"{shown} with other arguments: {'; '.join(differing)}; set them as they were, or choose another"
        )


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write or replace a JSON file as a whole."""
    write_whole(path, json.dumps(document, indent=2) + "\n")

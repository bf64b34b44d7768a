"""Load prompts from the built-in generator, files or the Hugging Face Hub.

A reader yields each row with its place (`file:line`, or `name, row k`), which errors name; `load_prompts` checks rows.
"""

import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlpack.batch.errors import DataError
from rlpack.data.examples import Example, PromptDataset, check_prompt, check_text
from rlpack.data.hub import NotOnHubError, Repository, hub_problem
from rlpack.path_suggestions import DATA_FILES, suggest_path

__all__ = ["Example", "PromptDataset", "SplitUse", "load_prompts"]

Row = tuple[str, Mapping[str, Any]]
_LONGEST_SHOWN, _LONGEST_REASON = 60, 500
# The names of a dataset's configurations in the error of a missing or unknown one.
_SUBSETS = re.compile(r"(?:Config name is missing\.[^[]*|BuilderConfig .* not found\. Available: )\[(.*?)\]", re.DOTALL)
# What to do about a column that rows lack, by the key that names it.
_REMEDIES = {
    "data.prompt_column": "set data.prompt_column",
    "data.answer_column": "set data.answer_column, or data.answer_column=null if there is none",
    "data.completion_column": (
        "set data.completion_column, or choose data=jsonl, data=parquet or data=hub, which need no demonstrations"
    ),
}
# Suffixes of local files; a source with one of them is never a dataset on the Hub.
_FILE_SUFFIXES = frozenset(
    (*DATA_FILES, ".arrow", ".bz2", ".csv", ".gz", ".json", ".ndjson", ".pq", ".tsv", ".txt", ".xz", ".zip", ".zst")
)


@dataclass(frozen=True)
class SplitUse:
    """The keys that set a split, for messages, and what its rows must have.

    Attributes:
        source_key: the key of the source.
        split_key: the key of the split.
        subset_key: the key of the subset.
        subset: name of the configuration of a dataset that has several; ignored for files.
        needs_demonstrations: whether every row needs a demonstration, if `completion_column` is set.
        needs_answers: whether every row needs the column of answers, which only rewards read.
    """

    source_key: str = "data.source"
    split_key: str = "data.split"
    subset_key: str = "data.subset"
    subset: str | None = None
    needs_demonstrations: bool = True
    needs_answers: bool = True


TRAINING = SplitUse()


def load_prompts(
    source: str,
    *,
    split: str,
    seed: int,
    prompt_column: str = "prompt",
    answer_column: str | None = "answer",
    completion_column: str | None = None,
    generator: Mapping[str, Any] | None = None,
    use: SplitUse = TRAINING,
) -> PromptDataset:
    """Return the prompts of a source, with all rows checked.

    Rows are named by their column `uid`, or by split and number if there is none.

    Args:
        source: `arithmetic`, a .jsonl or .parquet file, a folder, or the name of a dataset on the Hub.
        split: split of the generator or the Hub dataset; ignored for files.
        seed: seed of the generator.
        prompt_column: column of the prompt: text, or a list of chat messages.
        answer_column: column of the answer that rewards compare with; None for none.
        completion_column: column of the demonstration, the target text of supervised steps; None for none.
        generator: arguments of the built-in generator.
        use: what the split is for.

    Raises:
        DataError: the source can't be read, lacks a column, has no rows, or has an invalid one, which the
            message names.
    """
    named = {"data.prompt_column": prompt_column, "data.answer_column": answer_column}
    named["data.completion_column"] = completion_column
    examples: list[Example] = []
    shapes: dict[str, str] = {}
    needed = {key: column for key, column in named.items() if column is not None}
    if not use.needs_demonstrations:
        needed.pop("data.completion_column", None)
    if not use.needs_answers:
        needed.pop("data.answer_column", None)
    rows = _rows(source, split, seed, generator or {}, use, prompt_column)
    for number, (place, row) in enumerate(rows):
        for key, column in needed.items():
            if column not in row:
                raise DataError(f"{place} has no column {column!r}; it has {', '.join(row)}; {_REMEDIES[key]}")
        answer = row.get(answer_column) if answer_column else None
        shapes.setdefault(_shape(answer), f"{place}: {answer_column} is {_brief(answer)}")
        if len(shapes.keys() - {"null"}) > 1:
            first, other = (text for shape, text in shapes.items() if shape != "null")
            raise DataError(f"{other}, but {first}; give all rows answers of one type")
        if isinstance(answer, str):
            check_text(answer, f"{place}: {answer_column}", allow_blank=True)
        examples.append(
            Example(
                uid=_uid(row, place, f"{split}-{number}"),
                prompt=check_prompt(row[prompt_column], f"{place}: {prompt_column}"),
                answer=answer,
                demonstration=_demonstration(row, place, completion_column, use),
                columns={name: value for name, value in row.items() if name not in {*named.values(), "uid"}},
            )
        )
    return PromptDataset(source, examples)


def _demonstration(row: Mapping[str, Any], place: str, column: str | None, use: SplitUse) -> str | None:
    """Return the demonstration in a row's column; where none is needed, None if it is missing or blank."""
    if column is None or (row.get(column) is None and not use.needs_demonstrations):
        return None
    text = check_text(row[column], f"{place}: {column}", allow_blank=not use.needs_demonstrations)
    return text if text.strip() else None


def _shape(answer: Any) -> str:
    """Return how a reward function can use an answer: compare it, iterate over it, or look keys up in it."""
    if isinstance(answer, Mapping):
        return "object"
    return "list" if isinstance(answer, list | tuple) else "null" if answer is None else "value"


def _brief(answer: Any) -> str:
    return f"{repr(answer)[:_LONGEST_SHOWN]} ({type(answer).__name__})"


def _uid(row: Mapping[str, Any], place: str, default: str) -> str:
    """Return the row's uid, or `default` if it has none."""
    if "uid" not in row:
        return default
    return check_text(row["uid"], f"{place}: uid")


def _rows(
    source: str, split: str, seed: int, generator: Mapping[str, Any], use: SplitUse, prompt_column: str
) -> Iterator[Row]:
    """Yield the place and the columns of every row of a source."""
    if source == "arithmetic":
        return _generated(source, split, seed, generator)
    path = local_path(source, use.source_key)
    if path is None or path.is_dir():
        return _without_invented_keys(_hub(str(path or source), split, use), prompt_column)
    if path.suffix not in DATA_FILES:
        raise DataError(
            f"{source} has the unsupported suffix {path.suffix!r}; set {use.source_key} to a .jsonl or .parquet file, "
            "a folder, or the name of a dataset on the Hub"
        )
    return _jsonl(path) if path.suffix == ".jsonl" else _without_invented_keys(_parquet(path), prompt_column)


def local_path(source: str, key: str = "data.source") -> Path | None:
    """Return the file or folder of a source, which `key` sets; None for a dataset on the Hub.

    Raises:
        DataError: the source is a path that does not exist.
    """
    path = Path(os.path.expanduser(source))
    try:
        exists = path.exists()
    except OSError as error:  # a folder that may not be read
        raise DataError(f"{source} can't be read: {error.strerror or error}; set {key}") from error
    if exists:
        return path
    if not source.startswith(("/", "./", "../", "~")) and path.suffix.lower() not in _FILE_SUFFIXES:
        return None
    raise DataError(f"there is no file {source}; set {key} (relative paths start at {Path.cwd()}){suggest_path(path)}")


def _generated(source: str, split: str, seed: int, arguments: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the built-in task."""
    module = importlib.import_module(f"rlpack.data.{source}")
    try:
        task = module.ArithmeticTask(**arguments)
    except TypeError as error:
        allowed = ", ".join(module.ArithmeticTask.__dataclass_fields__)
        raise DataError(f"data.generator: {error}; the keys are {allowed}") from error
    columns = module.generate(split, seed=seed, task=task)
    for number, values in enumerate(zip(*columns.values(), strict=True)):
        yield f"{source}, row {number}", dict(zip(columns, values, strict=True))


class _RepeatedKeyError(ValueError):
    """A JSON object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; `json.loads` would silently keep the last of several values of a key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _RepeatedKeyError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _jsonl(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSONL file; a byte-order mark, CRLF and blank lines are accepted."""
    for number, line in enumerate(_lines(path), start=1):
        place = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{place} is not UTF-8: {error}; save the file as UTF-8") from error
        if not text:
            continue
        try:
            row = _DECODER.decode(text)
        except _RepeatedKeyError as error:
            raise DataError(f"{place} has the key {error.key!r} twice; rename or remove one") from error
        except (ValueError, RecursionError) as error:  # ValueError: a number with more digits than Python parses
            where: Any = error
            if isinstance(error, json.JSONDecodeError):  # leave out its line number, which is always 1
                where = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            raise DataError(f"{place} is not JSON: {where}; it begins {text[:60]!r}") from error
        if not isinstance(row, dict):
            raise DataError(f"{place} is a {type(row).__name__}; every line must be one JSON object")
        yield place, row


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file."""
    try:
        with path.open("rb") as lines:
            yield from lines
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}; make it readable") from error


def _parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for name in names:
                if (count := names.count(name)) > 1:
                    raise DataError(f"{path} has {count} columns {name!r}; rename one")
            number = 0
            for batch in file.iter_batches():
                batch.validate(full=True)  # text that is not UTF-8
                columns = {
                    name: _values(column, f"{path}: column {name!r}")
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                for row in range(batch.num_rows):
                    yield f"{path}, row {number}", {name: values[row] for name, values in columns.items()}
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} can't be read as Parquet: {str(error).rstrip('.')}; write the file again") from error


def _values(column: Any, what: str) -> list[Any]:
    """Return the values of an Arrow column as Python objects."""
    try:
        return column.to_pylist()
    except (OverflowError, ValueError) as error:  # Python's dates end in the year 9999
        raise DataError(
            f"{what} has a value that Python can't hold ({column.type}): {error}; correct it or make it text"
        ) from error


def _without_invented_keys(rows: Iterator[Row], column: str) -> Iterator[Row]:
    """Drop the keys with null from the objects in a column, such as chat messages.

    Arrow gives every object in a column the keys of all, so each tool call would have the arguments of all tools.
    """
    for place, row in rows:
        yield place, {name: _without_nulls(value) if name == column else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _hub(source: str, split: str, use: SplitUse) -> Iterator[Row]:
    """Yield the rows of a folder or a dataset on the Hub, using `datasets.load_dataset`."""
    import datasets

    check_hub(source, use.source_key)
    try:
        table = _with_encoded_files(datasets.load_dataset(source, use.subset, split=split))
        for number, row in enumerate(table):
            yield f"{source}, row {number}", _with_local_files(dict(row), table.features)
    except Exception as error:  # every kind of file has its own errors; so do broken rows, shards and scripts
        if names := _SUBSETS.search(str(error)):
            shown = names[1].replace("'", "")
            given = "has several subsets" if use.subset is None else f"has no subset {use.subset!r}"
            raise DataError(f"dataset {source!r} {given}; set {use.subset_key} to one of {shown}") from error
        folder = "a folder with files of the dataset only" if Path(source).is_dir() else "a folder"
        raise DataError(
            f"dataset {source!r}, split {split!r}, can't be loaded: {_reason(error)}; set {use.source_key} to a "
            f"dataset on the Hub, {folder}, a .jsonl or .parquet file, and {use.split_key} to its split"
        ) from error


def _with_encoded_files(table: Any) -> Any:
    """Return a table of `datasets` whose images, sounds and other files are not decoded.

    Decoded ones differ between processes, so that a resumed run would take the rows for others.
    """
    for name, feature in table.features.items():
        encoded = _encoded(feature)
        if encoded != feature:
            table = table.cast_column(name, encoded)
    return table


def _encoded(feature: Any) -> Any:
    """Return a feature of `datasets` without decoding of files."""
    import datasets

    if isinstance(feature, dict):
        return {name: _encoded(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_encoded(feature.feature))
    options = {option.name for option in fields(feature)}
    is_json = type(feature).__name__ == "Json"  # objects that are stored as text
    return replace(feature, decode=False) if "decode" in options and not is_json else feature


def _with_local_files(value: Any, feature: Any) -> Any:
    """Return a value of an encoded feature in which local files are bytes and a name.

    Otherwise a copy of the folder, or of the Hub's cache, would have other rows.
    """
    import datasets

    if value is None:
        return None
    if isinstance(feature, dict):
        return {name: _with_local_files(value[name], inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return [_with_local_files(item, feature.feature) for item in value]
    is_file = vars(feature).get("decode") is False
    match value:
        case {"bytes": None, "path": str(path)} if is_file and os.path.isabs(path) and os.path.isfile(path):
            return {"bytes": Path(path).read_bytes(), "path": os.path.basename(path)}
    return value


def _reason(error: Exception) -> str:
    """Return the text of a `datasets` error on one line: for a generic error, that of its cause."""
    is_general = str(error).startswith("An error occurred while generating the dataset")
    cause = (error.__cause__ or error) if is_general else error
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 150]} … {text[-150:]}"


def check_hub(source: str, key: str = "data.source") -> None:
    """Raise within seconds unless a source, which `key` sets, is local or the Hub has it.

    Raises:
        DataError: the Hub can't be reached, or has no such dataset.
    """
    if source == "arithmetic" or local_path(source, key) is not None:
        return
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        problem = hub_problem(Repository("dataset", source))
    except NotOnHubError:
        problem = "it has no such dataset, or you have no access"
    if problem:
        raise DataError(
            f"dataset {source!r} is not a local file or folder, and {constants.ENDPOINT} can't be asked for it "
            f"({problem}){suggest_path(Path(source))}; set {key} to a dataset that it has and you may read, to a "
            "local .jsonl or .parquet file, or set HF_HUB_OFFLINE=1 to use cached datasets"
        )

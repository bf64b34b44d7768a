"""Folders of models and tokenizers: complete, undamaged, and fit for each other, by their headers alone.

Weights are never read: a safetensors file begins with a header that gives the offsets of all tensors, so a truncated
file, or a missing one of several, is found from sizes.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import started_roles
from rlpack.config.schema import Config
from rlpack.data.examples import SPECIAL_TOKENS
from rlpack.data.hub import Repository
from rlpack.models.errors import ModelError, no_end_problem, other_tokenizer_error
from rlpack.models.file_names import INDEX, WEIGHTS
from rlpack.models.hub_models import hub_model_problem, revision_of
from rlpack.observe.run_dir import CONFIG, METRICS, MODEL
from rlpack.path_suggestions import suggest_path
from rlpack.safe_files import open_regular, parse_json, read_object
from rlpack.startup.dataset_checks import check_stop_ids

_LENGTH_BYTES = 8  # of the header's length, at the beginning of the file
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# A tokenizer class that defines no special tokens.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def check_model_files(config: Config) -> None:
    """Check the folders that a run loads models and tokenizers from, and that the Hub has the others.

    Raises:
        ModelError: names the key, the file, what is wrong with it, and what to do.
    """
    for key, source, revision in _sources(config):
        folder = Path(os.path.expanduser(source))
        if os.path.isdir(folder):
            if hint := _hint_in_run(folder):
                raise ModelError(f"{key} is {source!r}, which is a run's directory{hint}")
            for problem in _loaded_weight_problems(config, key, folder):
                raise ModelError(f"{key} is {source!r}: {problem}; copy or download the folder again")
        elif is_path(source):
            hint = suggest_path(folder, folders_only=True)
            raise ModelError(f"{key} is {source!r}, which is not a folder{hint}; set a folder, or a hub name")
        else:
            _check_hub(key, source, revision)
    for problem in _tokenizer_problems(config):
        raise ModelError(problem)
    _check_same_tokenizers(config)


def hub_models(config: Config) -> Iterator[Repository]:
    """Yield the models and tokenizers that a run loads from the Hub."""
    for _, source, revision in _sources(config):
        if not is_path(source):
            yield Repository("model", source, revision)


def _sources(config: Config) -> Iterator[tuple[str, str, str | None]]:
    """Yield key, folder or Hub name, and revision of each model and tokenizer that a run loads."""
    model, roles = config.model, started_roles(config)
    loaded: list[tuple[str, str | None, str | None]] = [
        ("model.path", model.path, model.revision),
        ("model.tokenizer", model.tokenizer, revision_of(model, "model.tokenizer")),
    ]
    loaded += [("critic.path", config.critic.path, config.critic.revision)] if "critic" in roles else []
    scorer = config.reward_model
    loaded += [("reward_model.path", scorer.path, scorer.revision)] if "reward_model" in roles else []
    yield from ((key, source, revision) for key, source, revision in loaded if source is not None)


def is_path(source: str) -> bool:
    """Return whether a source is a path, of something that exists or not, rather than a hub name."""
    looks_like_one = os.path.isabs(source) or source.startswith((".", "~")) or source.count("/") > 1
    return looks_like_one or os.path.exists(source)


def _check_hub(key: str, name: str, revision: str | None) -> None:
    """Raise within seconds if neither the Hub nor its cache has a model; the loader would find out later."""
    from huggingface_hub import constants, try_to_load_from_cache

    problem = hub_model_problem(key, name, revision)
    if not problem:
        return
    files = TOKENIZER_FILES if key == "model.tokenizer" else ("config.json",)
    if not any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
        hint = suggest_path(Path(name), folders_only=True)
        raise ModelError(
            f"{key} is {name!r}: there is no such folder in {Path.cwd()}, {constants.ENDPOINT} can't be asked for it "
            f"({problem}), and its cache has no such model{hint}; set a folder, or the name of a model on the Hub"
        )


def _hint_in_run(folder: Path) -> str:
    """Return which folder to use instead of a run's directory, "" if the folder isn't one."""
    if (folder / "config.json").is_file() or not ((folder / METRICS).is_file() and (folder / CONFIG).is_file()):
        return ""
    if (folder / MODEL).is_dir():
        return f"; did you mean {folder / MODEL}?"
    return f" without a {MODEL} folder, which a run writes at its end: finish the run with resume=auto"


def _loaded_weight_problems(config: Config, key: str, folder: Path) -> Iterator[str]:
    """Yield what is wrong with the files that the trainer and the engine load from a folder."""
    if key != "model.tokenizer":
        yield from weight_problems(folder, by_vllm=False)
    if key == "model.path" and config.rollout.engine == "vllm":
        yield from weight_problems(folder)


def weight_problems(folder: Path, *, by_vllm: bool = True) -> Iterator[str]:
    """Yield what is wrong with the safetensors files of a model's folder.

    transformers leaves the index of an earlier save in a folder that it saves again as one file. It then loads that
    file, while vLLM goes by the index.

    Args:
        folder: the model's folder.
        by_vllm: whether vLLM loads the model, rather than transformers.
    """
    if not (folder / "config.json").is_file():
        yield "there is no config.json in it"
        return
    try:
        read_object(folder / "config.json")
    except (OSError, ValueError) as error:
        yield f"config.json can't be read ({error})"
        return
    has_index, has_file = (folder / INDEX).is_file(), (folder / WEIGHTS).is_file()
    if has_file and not (by_vllm and has_index):
        yield from _file_problems(folder / WEIGHTS, set())
        return
    if not has_index:
        yield f"there is no {WEIGHTS} and no {INDEX} in it, and weights of other formats aren't loaded"
        return
    try:
        weight_map = read_object(folder / INDEX)["weight_map"]
        files: dict[str, set[str]] = {}
        for tensor, name in weight_map.items():
            files.setdefault(str(name), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{INDEX} can't be read ({type(error).__name__}: {error})"
        return
    for name, tensors in sorted(files.items()):
        if not (folder / name).is_file():
            hint = f" (if {WEIGHTS} holds all weights, delete the index)" if has_file else ""
            yield f"{name}, which {INDEX} names, is missing{hint}"
        else:
            yield from _file_problems(folder / name, tensors)


def _file_problems(path: Path, tensors: set[str]) -> Iterator[str]:
    """Yield why a safetensors file is damaged, or lacks one of the tensors that it should hold."""
    size = path.stat().st_size
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
                yield f"{path.name} has {size:,} bytes, fewer than its header says; it is truncated or not safetensors"
                return
            header = parse_json(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        yield f"the header of {path.name} can't be read ({type(error).__name__}: {error})"
        return
    if (expected := _LENGTH_BYTES + length + end) != size:
        yield f"{path.name} has {size:,} bytes, but its header describes {expected:,}; it is damaged or truncated"
    elif not entries:
        yield f"{path.name} holds no tensors"
    elif missing := sorted(tensors - entries.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield f"{path.name} lacks {missing[0]}{more} of the tensors that {INDEX} names"


def _tokenizer_problems(config: Config) -> Iterator[str]:
    """Yield why the tokenizer of a folder doesn't fit the model or the recipe."""
    model = config.model
    source, key = (model.tokenizer, "model.tokenizer") if model.tokenizer else (model.path, "model.path")
    folder = Path(os.path.expanduser(source or ""))
    if source is None or not (folder / "tokenizer.json").is_file():
        return
    try:
        size = _num_tokens(read_object(folder / "tokenizer.json"))
        known = _vocabulary_size(Path(os.path.expanduser(model.path))) if model.path else None
        has_no_end = _has_no_end(folder)
        base_ends = model.path is not None and _lists_ends(Path(os.path.expanduser(model.path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{key} is {source!r}, in which a JSON file can't be read ({error}); copy or download the folder again"
        return
    if known is not None and size > known:
        yield (
            f"{key} is {source!r}, whose tokenizer has {size:,} tokens, but the model has {known:,} (vocab_size in "
            "config.json); set model.tokenizer to the model's own"
        )
    if known is not None:
        check_stop_ids(config, known)
    # The base model's end tokens and the template's end of a turn also end responses; preflight looks for them.
    may_end = bool(config.rollout.stop_token_ids) or config.data.chat_template or base_ends
    if recipe_of(config).generates and has_no_end and not may_end:
        yield no_end_problem(f"{key} is {source!r}, whose tokenizer", config.rollout.max_new_tokens)


def _check_same_tokenizers(config: Config) -> None:
    """Raise if a critic or a reward model in a folder certainly has a different tokenizer from the policy."""
    source = config.model.tokenizer or config.model.path
    policy = _vocabulary(source) if source is not None else {}
    for key, path, _ in _sources(config):
        if not key.startswith("model.") and (other := _vocabulary(path)):
            if policy and not _may_agree(other, policy):
                raise other_tokenizer_error(key, path, len(other), f"{len(policy)} tokens")
            if source is None and any(len(token) > 1 and token not in SPECIAL_TOKENS for token in other):
                raise other_tokenizer_error(key, path, len(other), "characters")


def _vocabulary(source: str) -> dict[str, int]:
    """Return the ids of the tokens in a folder's tokenizer.json, {} if they can't be read."""
    path = Path(os.path.expanduser(source)) / "tokenizer.json"
    try:
        tokenizer = read_object(path)
        words = tokenizer["model"]["vocab"]
        ids = dict(words) if isinstance(words, dict) else {word: index for index, (word, _) in enumerate(words)}
        return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _may_agree(first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    """Return whether two vocabularies could be parts of the same one: no token has two ids, no id has two tokens."""
    tokens = {index: token for token, index in second.items()}
    return all(
        second.get(token, index) == index and tokens.get(index, token) == token for token, index in first.items()
    )


def _num_tokens(tokenizer: Mapping[str, Any]) -> int:
    """Return how many tokens a tokenizer.json has, with the added ones."""
    vocabulary = tokenizer["model"].get("vocab", {})
    words = set(vocabulary) if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
    return len(words | {token["content"] for token in tokenizer.get("added_tokens") or []})


def _vocabulary_size(folder: Path) -> int | None:
    """Return the tokens of the model in a folder, None if its config.json doesn't say."""
    if not (folder / "config.json").is_file():
        return None
    config = read_object(folder / "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _lists_ends(folder: Path) -> bool:
    """Return whether a model may have end tokens in its generation config; that of a model on the Hub isn't read."""
    path = folder / "generation_config.json"
    return not folder.is_dir() or (path.is_file() and read_object(path).get("eos_token_id") is not None)


def _has_no_end(folder: Path) -> bool:
    """Return whether a tokenizer certainly has no end-of-sequence token; other classes may have a default."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= read_object(folder / name)
    return settings.get("tokenizer_class") in _PLAIN_CLASSES and settings.get("eos_token") is None

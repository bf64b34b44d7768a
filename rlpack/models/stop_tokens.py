"""The tokens that end a response.

A run, its evaluations and `rlpack evaluate` stop at the same ones; an exported model's generation config lists them.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from rlpack.config.schema import Config, Model
from rlpack.data.tokenization import eos_id
from rlpack.data.turn_end import turn_end_id
from rlpack.models.errors import ModelError
from rlpack.models.loading import hub_arguments


def stop_token_ids(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response, each once; the model need not have all of them.

    They are those of `own_stop_token_ids`, the tokenizer's end of sequence, and `eos_token_id` in the generation config
    of `model.path`.

    Raises:
        ModelError: the model's generation config can't be read, or has something else in place of ids.
    """
    eos = eos_id(tokenizer)
    base = () if config.model.path is None else _base_ids(config.model.path, config.model.revision)
    return tuple(dict.fromkeys((*own_stop_token_ids(config, tokenizer), *([] if eos is None else [eos]), *base)))


def own_stop_token_ids(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return `rollout.stop_token_ids` and, with `data.chat_template`, the id that ends a turn in the template."""
    turn_end = turn_end_id(tokenizer) if config.data.chat_template else None
    return (*config.rollout.stop_token_ids, *([] if turn_end is None else [turn_end]))


@cache  # asked for in every step; a model of the Hub would be looked up each time
def _base_ids(path: str, revision: str | None) -> tuple[int, ...]:
    """Return `eos_token_id` in a model's generation config; () without one."""
    given = _generation_config(path, revision).get("eos_token_id")
    ids = tuple(given) if isinstance(given, list) else () if given is None else (given,)
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"model.path is {path!r}, whose {GENERATION_CONFIG_NAME} has eos_token_id {given!r}; it must be a token id "
            "(0 or more) or a list of them; correct it in a copy of the model's folder"
        )
    return ids


def _generation_config(path: str, revision: str | None) -> dict[str, Any]:
    folder = Path(os.path.expanduser(path))
    try:
        if folder.is_dir():
            file = folder / GENERATION_CONFIG_NAME
        else:
            is_offline = hub_arguments(path, Model(path=path, revision=revision)).get("local_files_only", False)
            name = GENERATION_CONFIG_NAME
            file = Path(hf_hub_download(path, name, revision=revision, local_files_only=is_offline))
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it holds a {type(settings).__name__}, not an object")
    except (EntryNotFoundError, FileNotFoundError):
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path is {path!r}, whose {GENERATION_CONFIG_NAME} can't be read: {error}; copy or download the "
            "model again"
        ) from error
    return settings

"""What an exported policy's folder needs besides the files of `export_model`, so that it is used as it was trained.

Invariant (tests/unit/models/test_policy_folder.py): if the base model's generation config already has all tokens that
end the run's responses, the file isn't touched.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from rlpack.data.tokenization import eos_id, pad_id


def complete_policy_folder(folder: Path, tokenizer: PreTrainedTokenizerBase, *, stop_token_ids: Sequence[int]) -> None:
    """Add the tokenizer, and the tokens that end the run's responses, to a policy's exported folder.

    Args:
        folder: with the files of `export_model`.
        tokenizer: the run's tokenizer.
        stop_token_ids: ids that end a response, in addition to the tokenizer's end of sequence.

    Raises:
        OSError: a file could not be read or written.
    """
    tokenizer.save_pretrained(folder)
    if (folder / GENERATION_CONFIG_NAME).exists():  # custom models may be unable to generate
        _add_end_tokens(folder / GENERATION_CONFIG_NAME, tokenizer, stop_token_ids)


def _add_end_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
    """Add the ids that end a response to a generation config, where transformers and vLLM look for them.

    Padding, which may be the base model's former end of sequence, is only set if it is missing.
    """
    settings = json.loads(path.read_text(encoding="utf-8"))
    own, eos = settings.get("eos_token_id"), eos_id(tokenizer)
    known = own if isinstance(own, list) else [] if own is None else [own]
    ids = list(dict.fromkeys([*known, *([] if eos is None else [eos]), *stop_token_ids]))
    if set(ids) == set(known):
        return
    settings["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    if tokenizer.pad_token_id is not None and settings.get("pad_token_id") is None:
        settings["pad_token_id"] = pad_id(tokenizer)
    # In transformers' format.
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")

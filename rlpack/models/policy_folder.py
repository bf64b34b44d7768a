"""What an exported policy's folder needs besides the files of `export_model`, so that it is used as it was trained.

Invariant (tests/unit/models/test_policy_folder.py): if the base model's generation config already has all tokens that
end the run's responses, the file isn't touched.
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from rlpack.config.schema import Model
from rlpack.data.tokenization import eos_id, pad_id

_log = logging.getLogger(__name__)

# transformers and vLLM build the processor of images, videos and audio from these.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def complete_policy_folder(
    folder: Path, model: Model, tokenizer: PreTrainedTokenizerBase, *, stop_token_ids: Sequence[int]
) -> None:
    """Add tokenizer, processor, and the tokens that end the run's responses to a policy's exported folder.

    Args:
        folder: with the files of `export_model`.
        model: the `model` section. If the exported model is multimodal, the processor is copied from `model.path`.
        tokenizer: the run's tokenizer.
        stop_token_ids: ids that end a response, in addition to the tokenizer's end of sequence.

    Raises:
        OSError: a file of the folder could not be read or written.
    """
    save_tokenizer(tokenizer, folder)
    if model.path is not None and _is_multimodal(folder):
        _copy_processor(model.path, model.revision, folder)
    if (folder / GENERATION_CONFIG_NAME).exists():  # custom models may be unable to generate
        _add_end_tokens(folder / GENERATION_CONFIG_NAME, tokenizer, stop_token_ids)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files of a tokenizer into a folder.

    Raises:
        OSError: a file could not be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions, for a full disk, too
        raise OSError(f"the tokenizer can't be written to {folder}: {error}") from error


def _is_multimodal(folder: Path) -> bool:
    """Return whether an exported model has parts for other inputs than text; of some models, only the text's is."""
    if not (folder / CONFIG_NAME).exists():
        return False
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    return not {"text_config", "vision_config", "audio_config"}.isdisjoint(config)


def _copy_processor(source: str, revision: str | None, folder: Path) -> None:
    """Copy the processor's files from a folder or the Hub; text can be generated without, so failures are warnings."""
    base, failures, is_offline = Path(os.path.expanduser(source)), {}, False
    for name in _PROCESSOR_FILES:
        try:
            if base.is_dir():
                path = base / name
            else:  # after a failure from the cache, so that an unreachable Hub is waited for once
                path = Path(hf_hub_download(source, name, revision=revision, local_files_only=is_offline))
            if path.exists():
                shutil.copyfile(path, folder / name)
        except Exception as error:  # noqa: BLE001 - the Hub's client also raises errors of its HTTP library
            (folder / name).unlink(missing_ok=True)  # a part of it may have been copied
            # The other kind of this error: the repository has no such file.
            if isinstance(error, LocalEntryNotFoundError) or not isinstance(error, EntryNotFoundError):
                failures[name], is_offline = error, True
    if failures:
        _log.warning(
            "%s could not be copied from %s to the exported model (%s); copy those that it has into the model's "
            "folder, or transformers and vLLM may be unable to load the model's processor",
            *(", ".join(failures), source, str([*failures.values()][-1]).partition("\n")[0]),
        )


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

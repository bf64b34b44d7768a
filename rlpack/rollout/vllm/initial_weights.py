"""The weights that vLLM starts with, in files that it reads."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rlpack.config.schema import Model
from rlpack.data.tokenization import eos_id, pad_id
from rlpack.models.file_names import WEIGHTS
from rlpack.models.loading import build_causal_lm
from rlpack.rollout.layout_check import weights_and_buffers


@contextmanager
def initial_weights(model: Model, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[str]:
    """Yield the model's folder or hub name; a new model is built and written, with equal weights for every engine."""
    if model.path is not None:
        folder = Path(os.path.expanduser(model.path))
        yield str(folder) if folder.is_dir() else model.path
        return
    with tempfile.TemporaryDirectory(prefix="rlpack-vllm-") as folder:
        built = build_causal_lm(
            model,
            vocab_size=len(tokenizer),
            eos_token_id=eos_id(tokenizer),
            pad_token_id=pad_id(tokenizer),
            seed=seed,
            attention_name="sdpa",
        )
        # Not by save_pretrained, which writes nothing on ranks other than 0.
        built.config.architectures = [type(built).__name__]
        built.config.save_pretrained(folder)
        weights = revert_weight_conversion(built, weights_and_buffers(built))
        save_file(
            {name: weight.detach().contiguous() for name, weight in weights.items()},
            Path(folder) / WEIGHTS,
            metadata={"format": "pt"},
        )
        del built, weights
        yield folder

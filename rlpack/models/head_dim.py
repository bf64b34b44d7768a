"""The size of an attention head, which some models read although their config doesn't declare it."""

from pathlib import Path

HEAD_DIM = "head_dim"


def reads_head_dim(modeling: Path) -> bool:
    """Return whether the code of a model type uses a `head_dim` of its config, if there is one.

    The checkpoints of Qwen3-MoE set it, for example, and its config takes any name.

    Args:
        modeling: the source file of the model type; it may not exist.
    """
    # The rotary embedding of GPT-NeoX reads it, too, but not its attention.
    return modeling.is_file() and f'self.{HEAD_DIM} = getattr(config, "{HEAD_DIM}"' in modeling.read_text(
        encoding="utf-8"
    )

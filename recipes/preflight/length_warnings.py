"""Warn about rows that are longer than those that the model was made for."""

from collections.abc import Iterable

from transformers import PreTrainedModel

from rlpack.config.schema import Config
from rlpack.data.prompts import Prompts
from rlpack.models.rope import length_limit


def length_warnings(config: Config, model: PreTrainedModel, splits: Iterable[Prompts]) -> list[str]:
    """Return a warning if prompts and responses together can exceed the positions that the model was made for.

    Args:
        config: the whole configuration, of a recipe that generates.
        model: the policy, with or without weights.
        splits: all prompts for which responses are generated.
    """
    limit = length_limit(model.config)
    if limit is None:
        return []
    (key, most), response = limit, config.rollout.max_new_tokens
    prompt = max(int(split.input_ids.lengths.max()) for split in splits)
    if prompt + response <= most:
        return []
    if prompt >= most:
        return [
            f"prompts have up to {prompt} tokens, but the model was made for rows of {most} ({key}), responses "
            f"included; set data.max_prompt_tokens below {most} and data.overlong_prompt=drop, or use another model"
        ]
    return [
        f"rollout.max_new_tokens is {response}: with prompts of up to {prompt} tokens, rows have up to "
        f"{prompt + response}, but the model was made for {most} ({key}); lower it to {most - prompt} or less"
    ]

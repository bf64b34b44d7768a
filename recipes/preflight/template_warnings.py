"""Warn about plain-text prompts of a model that has a chat template."""

from transformers import PreTrainedTokenizerBase

from rlpack.config.schema import Config
from rlpack.data.prompts import Prompts


def template_warnings(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    """Return a warning if prompts probably lack the form in which a pretrained model was trained.

    A text's special tokens become plain characters, so already rendered prompts lose their special tokens.

    Args:
        config: the whole configuration.
        tokenizer: the policy's.
        prompts: of one split.
    """
    template = tokenizer.chat_template
    texts = [example.prompt for example in prompts.examples if isinstance(example.prompt, str)]
    if config.model.path is None or not isinstance(template, str) or not texts:
        return []
    markers = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    markers = [marker for marker in markers if marker in template]
    rendered = {marker: count for marker in markers if (count := sum(marker in text for text in texts))}
    if rendered:
        marker, count = max(rendered.items(), key=lambda item: item[1])
        return [
            f"{count} of {len(texts)} prompts contain {marker!r}, a special token of the chat template, but text in a "
            "dataset is tokenized as plain characters; store the text alone, or a list of chat messages, in "
            f"data.prompt_column ({config.data.prompt_column}), and set data.chat_template=true"
        ]
    if config.data.chat_template:
        return []
    return [
        "data.chat_template is false, so prompts are used as plain text, but the tokenizer has a chat template; for an "
        "instruct model, set data.chat_template=true, so that prompts have the format that the model was trained on"
    ]

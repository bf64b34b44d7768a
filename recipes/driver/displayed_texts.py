"""The texts of responses as evaluations display and store them."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.store import Store
from rlpack.data.tokenization import prompt_for_display
from rlpack.data.tools import COLUMN as TOOLS


class DisplayedText(NamedTuple):
    """The texts of one response.

    Attributes:
        prompt: as the chat template renders it for the model, with its tools.
        completion: the response.
        answer: reference for rewards.
    """

    prompt: str
    completion: str
    answer: str | None


def displayed_texts(tokenizer: PreTrainedTokenizerBase, store: Store, rollouts: BatchedDataDict) -> list[DisplayedText]:
    """Return the texts of each row, which are fetched from the store."""
    columns = ("prompt", "completion", "answer", TOOLS)
    texts = store.fetch(rollouts.keep([name for name in columns if name in rollouts]))
    tools = texts.get(TOOLS, [None] * texts.num_rows)
    return [
        DisplayedText(prompt_for_display(tokenizer, prompt, own), completion, None if answer is None else str(answer))
        for prompt, completion, answer, own in zip(
            texts["prompt"], texts["completion"], texts["answer"], tools, strict=True
        )
    ]

"""samples.jsonl: one line per response, written part by part.

Invariants (tests/unit/observe/evaluation/test_sample_rows.py):

1. The rows are in the order of `RowLayout`: prompt by prompt, its samples, then its greedy response.
2. After a kill, the file is cut after its last whole part, so every part is generated in a single batch. What a row
   generates may depend on its batch through rounding; this way, a resumed evaluation has the rows of an uninterrupted
   one.
3. A row that belongs to another evaluation is refused, never skipped.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from rlpack.observe.errors import EvaluationError


@dataclass(frozen=True)
class SampleRow:
    """One response.

    Attributes:
        prompt_index: position of the prompt in the dataset.
        uid: name of the prompt.
        sample: number of the sample; None for the greedy response.
        seed: seed of the row's random numbers; None for the greedy response.
        prompt: the prompt as text, with messages as the chat template renders them.
        response: the response as text, without special tokens.
        answer: the dataset's reference answer as text, if there is one.
        extracted_answer: the response's answer, as the reward function defines it; None if there is none.
        reward: None if the response has no finite reward.
        finish_reason: `stop` or `length`.
        prompt_tokens: tokens of the prompt.
        response_tokens: tokens of the response.
    """

    prompt_index: int
    uid: str
    sample: int | None
    seed: int | None
    prompt: str
    response: str
    answer: str | None
    extracted_answer: str | None
    reward: float | None
    finish_reason: str
    prompt_tokens: int
    response_tokens: int


_NAMES = {field.name for field in fields(SampleRow)}


@dataclass(frozen=True)
class RowLayout:
    """Which rows an evaluation has, and in which parts.

    Attributes:
        num_prompts: P.
        samples: samples of each prompt (n).
        greedy: whether each prompt has a greedy response, too.
        prompts_per_part: prompts of each part but the last.
    """

    num_prompts: int
    samples: int
    greedy: bool
    prompts_per_part: int

    @property
    def rows_per_prompt(self) -> int:
        """The number of responses to each prompt."""
        return self.samples + self.greedy

    @property
    def num_rows(self) -> int:
        """The number of all responses."""
        return self.num_prompts * self.rows_per_prompt

    def whole_prompts(self, num_rows: int) -> int:
        """Return the number of prompts in the whole parts among the first `num_rows` rows.

        >>> RowLayout(num_prompts=5, samples=2, greedy=True, prompts_per_part=2).whole_prompts(11)
        2
        """
        rows_per_part = self.prompts_per_part * self.rows_per_prompt
        return self.num_prompts if num_rows >= self.num_rows else num_rows // rows_per_part * self.prompts_per_part

    def parts(self, first_prompt: int) -> Iterator[np.ndarray]:
        """Yield the positions of the prompts of each part from a prompt on, int64."""
        for start in range(first_prompt, self.num_prompts, self.prompts_per_part):
            yield np.arange(start, min(start + self.prompts_per_part, self.num_prompts))

    def place(self, row: int) -> tuple[int, int | None]:
        """Return prompt and sample of a row."""
        prompt, sample = divmod(row, self.rows_per_prompt)
        return prompt, sample if sample < self.samples else None


class SampleFile:
    """The rows of an evaluation on disk."""

    def __init__(self, path: Path, layout: RowLayout) -> None:
        self.path = path
        self._layout = layout

    def recover(self) -> int:
        """Cut the file after its last whole part, and return how many prompts it has.

        Raises:
            EvaluationError: a line belongs to another evaluation, or isn't a row.
        """
        if not self.path.exists():
            return 0
        ends = [0]
        for number, line in enumerate(_whole_lines(self.path)):
            self._check(number, line)
            ends.append(ends[-1] + len(line))
        done = self._layout.whole_prompts(len(ends) - 1)
        end = ends[done * self._layout.rows_per_prompt]
        if end < self.path.stat().st_size:
            os.truncate(self.path, end)
        return done

    def append(self, rows: Sequence[SampleRow]) -> None:
        """Write the rows of a part, and wait until they are on disk."""
        # ASCII, because lone surrogates in a model's text can't be encoded as UTF-8.
        text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
        with self.path.open("ab") as stream:
            stream.write(text.encode("ascii"))
            stream.flush()
            os.fsync(stream.fileno())

    def rows(self) -> Iterator[SampleRow]:
        """Yield all rows."""
        for line in _whole_lines(self.path):
            yield SampleRow(**json.loads(line))

    def _check(self, number: int, line: bytes) -> None:
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict) or values.keys() != _NAMES:
            raise EvaluationError(
                f"line {number + 1} of {self.path} is not a row that rlpack evaluate wrote; restore the file, or "
                "choose another evaluate.output_dir"
            )
        if number >= self._layout.num_rows or (values["prompt_index"], values["sample"]) != self._layout.place(number):
            raise EvaluationError(
                f"line {number + 1} of {self.path} is sample {values['sample']} of prompt {values['prompt_index']}, "
                "which is not the row that this evaluation has there; choose another evaluate.output_dir"
            )


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; the last one is left out if a kill cut it."""
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield line

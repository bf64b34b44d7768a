"""Rows of evaluations, for the tests of this folder."""

from rlpack.observe.evaluation.sample_rows import RowLayout, SampleRow


def sample_row(prompt: int = 0, sample: int | None = 0, /, **values) -> SampleRow:
    defaults = {
        "uid": f"p{prompt}",
        "seed": None if sample is None else 2**63 + prompt,
        "prompt": "1+1=",
        "response": f"two, {sample}",
        "answer": "2",
        "extracted_answer": None,
        "reward": 1.0,
        "finish_reason": "stop",
        "prompt_tokens": 4,
        "response_tokens": 3,
    }
    return SampleRow(prompt_index=prompt, sample=sample, **(defaults | values))


def all_rows(layout: RowLayout) -> list[SampleRow]:
    samples = [*range(layout.samples), *([None] if layout.greedy else [])]
    return [sample_row(prompt, sample) for prompt in range(layout.num_prompts) for sample in samples]

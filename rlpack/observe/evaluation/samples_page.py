"""samples.html: the responses of an evaluation, in one file that opens offline.

All text is escaped. A content security policy forbids scripts and external sources; the filter by reward is CSS.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rlpack.observe.evaluation.sample_rows import SampleRow
from rlpack.observe.text import shortened, visible

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# A larger page is slow to open; the prompts that are left out are in samples.jsonl.
MOST_CHARACTERS = 20_000_000
_LONGEST_TEXT = 20_000
# More distinct rewards than this are shown in ranges.
_MOST_VALUES = 6
_NUM_RANGES = 4
_CSS = """
:root { color-scheme: light; --ink: #1f2328; --faint: #59636e; --line: #d9dee3; --ground: #f6f8fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, 'DejaVu Sans', sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } p { margin: 8px 0 0; color: var(--faint); }
section, .box { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px 20px;
  margin-top: 14px; }
table { border-collapse: collapse; font-size: 14px; } td, th { padding: 4px 22px 4px 0; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } th { color: var(--faint); font-weight: 600; }
fieldset { position: sticky; top: 0; z-index: 1; border: 1px solid var(--line); border-radius: 10px; background: #fff;
  margin: 14px 0 0; padding: 8px 20px 12px; } legend { color: var(--faint); font-size: 13.5px; }
label { display: inline-block; margin: 2px 18px 2px 0; white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0 8px;
  font: 13px/1.45 ui-monospace, 'DejaVu Sans Mono', monospace; }
h2 { font-size: 14px; margin: 0 0 4px; color: var(--faint); overflow-wrap: anywhere; } .prompt { font-weight: 600; }
.r { border-top: 1px solid var(--line); padding-top: 8px; margin-top: 8px; }
.r span { color: var(--faint); font-size: 13.5px; overflow-wrap: anywhere; } .r b { color: var(--ink); }
"""


@dataclass(frozen=True)
class RewardFilter:
    """Which rewards one choice of the filter shows.

    Attributes:
        label: label of the choice.
        low: smallest reward; None for responses without one.
        high: largest reward.
    """

    label: str
    low: float | None
    high: float = 0.0

    def holds(self, reward: float | None) -> bool:
        """Return whether a response with this reward is shown."""
        if self.low is None or reward is None:
            return self.low is None and reward is None
        return self.low <= reward <= self.high


def reward_filters(rewards: Sequence[float | None]) -> list[RewardFilter]:
    """Return the choices of the filter, highest rewards first; together they hold each reward exactly once.

    If there are few distinct rewards, each has its own choice. Otherwise they are grouped into ranges with about
    equally many responses.

    >>> [choice.label for choice in reward_filters([1.0, 0.0, None, 1.0])]
    ['1', '0', 'no reward']
    """
    values = np.unique([reward for reward in rewards if reward is not None])
    if len(values) <= _MOST_VALUES:
        choices = [RewardFilter(f"{value:g}", value, value) for value in values.tolist()]
    else:
        finite = np.sort([reward for reward in rewards if reward is not None])
        cuts = np.unique(finite[[len(finite) * part // _NUM_RANGES for part in range(_NUM_RANGES)]])
        runs = np.split(values, np.searchsorted(values, cuts[1:]))
        choices = [RewardFilter(f"{run[0]:g} to {run[-1]:g}", float(run[0]), float(run[-1])) for run in runs]
    return [*reversed(choices), *([RewardFilter("no reward", None)] if None in rewards else [])]


def write_samples_page(
    path: Path,
    title: str,
    table: Sequence[tuple[str, str, str]],
    notes: Sequence[str],
    prompts: Iterable[Sequence[SampleRow]],
    rewards: Sequence[float | None],
) -> None:
    """Write the page.

    Args:
        path: the file.
        title: what was evaluated.
        table: name, value and interval of each statistic.
        notes: lines below the table.
        prompts: the rows of each prompt.
        rewards: rewards of all rows, in order; they determine the choices of the filter.
    """
    filters = reward_filters(rewards)
    counts = [sum(choice.holds(reward) for reward in rewards) for choice in filters]
    staging = path.with_name(f".{path.name}")
    with staging.open("w", encoding="utf-8") as file:
        file.write(_head(title, len(filters)))
        file.write(_summary(title, table, notes))
        file.write(_choices(filters, counts))
        room, left_out = MOST_CHARACTERS, 0
        for rows in prompts:
            block = "" if left_out else _prompt(rows, filters)
            room -= len(block)
            if left_out or room < 0:
                left_out += 1
            else:
                file.write(block)
        if left_out:
            file.write(f"<section>{left_out:,} more prompts are in samples.jsonl.</section>")
        file.write("</main></body></html>\n")
    staging.replace(path)


def _head(title: str, num_filters: int) -> str:
    """Return the page's beginning; a rule per choice hides what doesn't belong to it."""
    rules = "".join(
        f"main:has(#f{number}:checked) .x:not(.c{number}) {{ display: none; }}\n" for number in range(num_filters)
    )
    policy = f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{policy}<title>{_line(title)}</title>'
        f"<style>{_CSS}{rules}</style></head><body><main>"
    )


def _summary(title: str, table: Sequence[tuple[str, str, str]], notes: Sequence[str]) -> str:
    rows = "".join(
        f'<tr><td>{_line(name)}</td><td class="n">{_line(value)}</td><td class="n">{_line(interval)}</td></tr>'
        for name, value, interval in table
    )
    heads = '<tr><th>mean over prompts</th><th class="n">value</th><th class="n">95 % interval</th></tr>'
    text = "".join(f"<p>{_line(note)}</p>" for note in notes)
    return f'<h1>{_line(title)}</h1><div class="box"><table>{heads}{rows}</table></div>{text}'


def _choices(filters: Sequence[RewardFilter], counts: Sequence[int]) -> str:
    """Return the filter: one radio button for all responses, one for each choice."""
    labels = [("all", "all", sum(counts), " checked")]
    labels += [
        (f"f{number}", choice.label, count, "")
        for number, (choice, count) in enumerate(zip(filters, counts, strict=True))
    ]
    buttons = "".join(
        f'<label><input type="radio" name="reward" id="{name}"{checked}> {_line(label)} ({count:,})</label>'
        for name, label, count, checked in labels
    )
    return f"<fieldset><legend>responses by reward</legend>{buttons}</fieldset>"


def _prompt(rows: Sequence[SampleRow], filters: Sequence[RewardFilter]) -> str:
    """Return one prompt and its responses."""
    first = rows[0]
    parts = [(_classes(row, filters), row) for row in rows]
    all_classes = " ".join(dict.fromkeys(name for name, _ in parts))
    # A uid that rlpack made has the number already.
    number = "" if first.uid.endswith(f"-{first.prompt_index}") else f"{first.prompt_index} · "
    head = f"prompt {number}{first.uid}" + (f" · answer {first.answer}" if first.answer is not None else "")
    responses = "".join(
        f'<div class="r x {name}"><span>{" · ".join(_facts(row))}</span><pre>{_block(row.response)}</pre></div>'
        for name, row in parts
    )
    return (
        f'<section class="x {all_classes}"><h2>{_line(head)}</h2><pre class="prompt">{_block(first.prompt)}</pre>'
        f"{responses}</section>\n"
    )


def _classes(row: SampleRow, filters: Sequence[RewardFilter]) -> str:
    return next(f"c{number}" for number, choice in enumerate(filters) if choice.holds(row.reward))


def _facts(row: SampleRow) -> Iterator[str]:
    """Yield what the line above a response says, as HTML."""
    yield f"<b>{'no reward' if row.reward is None else f'reward {row.reward:g}'}</b>"
    yield "greedy" if row.sample is None else f"sample {row.sample}"
    if row.extracted_answer is not None:
        yield f"answers {_line(row.extracted_answer)}"
    yield _line(f"{row.response_tokens} tokens, {row.finish_reason}")


def _line(value: Any) -> str:
    """Return any value as one line of HTML text."""
    return escape(visible(shortened(str(value), _LONGEST_TEXT)))


def _block(text: str) -> str:
    """Return text as HTML with its line breaks, all other control characters escaped."""
    return "\n".join(escape(visible(line)) for line in shortened(text, _LONGEST_TEXT).split("\n"))

"""Answers for keys that are another framework's names, such as verl's `ppo_max_token_len_per_gpu`.

The names are in `foreign_names.yaml`, by framework.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class ForeignName:
    """A name of another framework, and its counterpart here.

    Attributes:
        framework: the project, as it writes its own name.
        name: dotted path, as its users write it.
        keys: what does the same here: `key`, or `key=value`; empty where nothing does.
        note: what differs, or why nothing does the same.
    """

    framework: str
    name: str
    keys: tuple[str, ...]
    note: str = ""


@functools.cache
def foreign_names() -> tuple[ForeignName, ...]:
    """Return all names, in the order of the file."""
    frameworks: Mapping[str, Mapping[str, Any]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return tuple(_read(framework, name, row) for framework, rows in frameworks.items() for name, row in rows.items())


def foreign_answer(path: str) -> str:
    """Return whose name a key is, by its whole path, and what it is called here; "" if no framework has it.

    >>> foreign_answer("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    "that is verl's name; here it is batching.max_tokens"
    """
    return _answer([name for name in foreign_names() if name.name == path])


def foreign_answer_by_last_part(path: str) -> str:
    """Return the same by the path's last part, or "" if that part has several meanings.

    >>> foreign_answer_by_last_part("trainer.lambd")
    "that is ROLL's and OpenRLHF's name; here it is critic.gae_lambda"
    """
    last = path.rpartition(".")[2]
    return _answer([name for name in foreign_names() if name.name.rpartition(".")[2] == last])


def _answer(matching: Sequence[ForeignName]) -> str:
    if not matching or len({name.keys for name in matching}) > 1:
        return ""
    owners = [f"{framework}'s" for framework in dict.fromkeys(name.framework for name in matching)]
    start = f"that is {' and '.join(filter(None, (', '.join(owners[:-1]), owners[-1])))} name; "
    keys, note = matching[0].keys, _notes(matching)
    if not keys:
        return f"{start}there is no such key here: {note}"
    return f"{start}here it is {' and '.join(keys)}" + (f" ({note})" if note else "")


def _notes(matching: Sequence[ForeignName]) -> str:
    """Return the only note; if frameworks have different ones, each framework's."""
    notes = list(dict.fromkeys(name.note for name in matching if name.note))
    if len(notes) < 2:
        return "".join(notes)
    return "; ".join(dict.fromkeys(f"{name.framework}: {name.note}" for name in matching if name.note))


def _read(framework: str, name: str, row: Any) -> ForeignName:
    """Return one row of the file; see the comment on top of it."""
    answer: Mapping[str, Any] = row if isinstance(row, dict) else {"keys": row}
    if others := answer.keys() - {"keys", "note", "none"}:
        raise ValueError(f"{framework} {name}: unknown {sorted(others)}; a note with a comma needs quotes")
    keys = answer.get("keys", ())
    return ForeignName(
        framework, name, (keys,) if isinstance(keys, str) else tuple(keys), answer.get("note", answer.get("none", ""))
    )

"""Names of the times that the draw of a batch takes.

With `trainer.lead`, a batch is drawn while earlier steps train. The record of the step that takes it has both the times
of its draw and those of the step itself, and their names tell which is which.
"""

from collections.abc import Mapping

_TIME = "time/"
# A draw's other times, such as those that a recipe measures, have this prefix.
_OTHER = "draw/"
_KNOWN = frozenset({"generate", "greedy", "reward", "wake", "sleep"})


def as_times_of_draw(times: Mapping[str, float]) -> dict[str, float]:
    """Return the times of a batch that was drawn ahead, by the names that its step's record gives them.

    >>> as_times_of_draw({"time/generate_s": 2.0, "time/recipe/revise_s": 1.0})
    {'time/generate_s': 2.0, 'time/draw/recipe/revise_s': 1.0}
    """
    named = {}
    for name, seconds in times.items():
        part = name.removeprefix(_TIME)
        named[name if is_of_draw(part.removesuffix("_s")) else f"{_TIME}{_OTHER}{part}"] = seconds
    return named


def is_of_draw(part: str) -> bool:
    """Return whether a part of a record's time belongs to the draw, if the batch was drawn ahead.

    >>> [is_of_draw(part) for part in ("generate", "draw/recipe/revise", "recipe/revise", "update")]
    [True, True, False, False]
    """
    return part in _KNOWN or part.startswith(_OTHER)

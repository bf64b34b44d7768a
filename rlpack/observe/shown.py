"""Figures as they are shown."""


def shown(form: str, *values: float) -> list[str]:
    """Return figures in one form; one for shares gives way to a plain number where not all of them are from 0 to 1.

    Mean rewards are shares of right answers for most functions, and points for some.

    >>> shown("{:.1%}", 0.5, 1.0), shown("{:.1%}", 0.5, 7.25)
    (['50.0%', '100.0%'], ['0.500', '7.250'])
    """
    if form.endswith("%}") and not all(0 <= value <= 1 for value in values):
        form = "{:.3f}"
    return [form.format(value) for value in values]

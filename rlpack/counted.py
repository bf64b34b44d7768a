"""A number with its noun, for messages."""


def counted(number: float, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun.

    >>> counted(1, "step"), counted(2000.0, "pass", "passes"), counted(0.0977, "pass", "passes")
    ('1 step', '2,000 passes', '0.098 passes')
    >>> counted(99.6, "pass", "passes"), counted(1.04, "pass", "passes")
    ('100 passes', '1 pass')
    """
    text = f"{number:,.0f}" if number == int(number) or number >= 10 else f"{number:.2g}"
    return f"{text} {singular if text == '1' else plural or singular + 's'}"

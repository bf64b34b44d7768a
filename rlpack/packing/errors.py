"""The error of everything that plans."""


class PackingError(ValueError):
    """Lengths, a budget or a spec that no plan can be made from; the text names value, limit and way out."""

"""Reinforcement-learning post-training of language models on Ray, with sequence packing end to end.

Custom roles import `rlpack.worker`. Recipes are in `rlpack.recipes`, built-in roles in `rlpack.workers`; both are links
to the top-level folders of the repository. docs/design.md describes the other packages.
"""

__version__ = "0.1.0"

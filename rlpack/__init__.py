"""Reinforcement-learning post-training of language models on Ray, packed from end to end."""

__version__ = "0.1.0"

"""Sections of the schema that several modules share, or that are large.

`section` holds the base class and the number types; the other modules hold the sections of optimization, compute,
batching, rewards, the critic and the reward model, and submitted jobs. `rlpack.config.schema` puts them together.
"""

"""Advantages, losses and KL: tensors in, tensors out; no I/O and no process groups.

A loss is written once, over flat tokens. `aggregation` turns token losses into one number by weights whose
denominators belong to the whole optimizer step, so a loss can't tell packed rows from padded ones, nor one rank
from many.
"""

"""Batches as named columns, and the prompts they are made from.

`batch` has `BatchedDataDict`, `ragged` its per-token columns without padding, `fields` the table of columns whose
meaning is fixed, `planning` the way from a batch to a plan, `wire` how tensors cross processes. `datasets` reads
prompts (`examples` checks them, `arithmetic` is the built-in task), `tokenisation` and `prompts` make token ids of
them, and `sampler` says which prompt and which random stream come when.
"""

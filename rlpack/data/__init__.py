"""Datasets, tokenization, and the order of prompts.

`datasets` reads a source (`examples` checks its rows, `arithmetic` is the built-in task), `tokenization` and `prompts`
turn examples into token ids, and `sampler` gives the prompt and the random seed of every sample. `length_files` reads
sequence lengths for plans without data.
"""

"""Batches as named columns, and the prompts they are made from."""

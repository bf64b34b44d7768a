"""Checkpoints: a commit protocol on plain files, and the sharded state that ranks write under it.

`commit` makes each checkpoint atomic, with the file operations in `files`. `sharded` saves and loads the weights and
optimizer state of each rank; `restricted` reads their files without running code from them.
"""

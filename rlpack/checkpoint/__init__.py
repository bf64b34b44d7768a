"""Checkpoints: a commit protocol on plain files, and the sharded state that ranks write under it.

`commit` makes each checkpoint atomic, with the file operations in `files`, and `model_folder` each exported model.
`sharded` saves and loads the weights and optimizer state of each rank, and `background` saves them while training goes
on; `restricted` reads their files without running code from them.
"""

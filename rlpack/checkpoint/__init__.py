"""Resumable state: a commit protocol on plain files, and the shards that ranks write under it.

`commit` makes a checkpoint whole or not there, on top of the file operations in `files`; `sharded` is what each rank
writes and reads in between.
"""

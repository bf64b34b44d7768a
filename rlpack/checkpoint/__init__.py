"""Resumable state: a commit protocol on plain files, and the shards that ranks write under it."""

"""Checks before a run starts."""

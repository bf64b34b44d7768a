"""Packing and partitioning algorithms."""

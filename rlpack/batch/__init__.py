"""The batch container."""

"""Models: loading, packed attention, token log-probabilities, sharding."""

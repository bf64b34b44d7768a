"""The driver's library."""

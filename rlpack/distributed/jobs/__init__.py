"""Ray jobs."""

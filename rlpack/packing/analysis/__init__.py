"""Metrics, cost, simulation."""

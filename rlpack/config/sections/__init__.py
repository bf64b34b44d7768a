"""Sections of the schema."""

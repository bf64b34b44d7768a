"""Reward functions, and how they are found, called and checked."""

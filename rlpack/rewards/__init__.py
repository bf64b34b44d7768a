"""Reward functions, and how they are found, called and checked.

`functions` has those that come along, `scoring` finds one by name, calls it and quarantines what is no finite number.
"""

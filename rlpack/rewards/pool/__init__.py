"""The pool of processes that runs reward functions."""

"""The roles: plain Python classes, one instance a rank. A user's own role looks like one of these."""

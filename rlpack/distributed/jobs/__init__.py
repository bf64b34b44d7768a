"""Runs as jobs of a Ray cluster, submitted from a machine outside of it.

- `client`: submit, list, follow and stop jobs over the cluster's job server.
- `upload`: which files of the working directory travel with a job.
- `secrets`: credentials that each process reads on its own node.
"""

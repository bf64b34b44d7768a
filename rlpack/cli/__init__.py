"""The command `rlpack`: `train` composes a config, checks it against the machine and runs its recipe, `report` draws.

Thin on purpose, and quick to answer: nothing heavy is imported before it is needed. `main` has the subcommands and the
exit codes, `train` the jobs of a command line, `surroundings` what a config needs from the machine. Recipes are found
by name, because they stand above this package.
"""

"""Recipes: one file per algorithm, whose loop runs on the driver and reads like the paper's pseudo-code.

- `grpo`, `ppo`, `dapo`, `remax`, `sft`: the recipes.
- `*_spec`: each recipe's roles, config section, rules and warnings, read before anything heavy is imported.
- `driver`: the building blocks of the loops: the session, the stages of a step, evaluation and resuming.
- `preflight`: checks that run before any process starts.
- `evaluate`: `rlpack evaluate`, which samples and scores and trains nothing.
"""

"""`rlpack train --dry-run` and `rlpack plan --suggest`: estimates of a run, without Ray and without weights.

- `role_memory`: the memory of a role's model on one rank, by simulating a step.
- `batch_plan`: the plan of a run's first batch.
- `engine_memory`: the memory of generation.
- `run_memory`: sums over the roles of a pool, and the limits.
- `changes`: single keys that lower a run's memory.
- `memory_report`: the text.
- `estimate_run`: the command.
- `suggest_layouts`: `rlpack plan --suggest`; `layout_candidates`: what it tries; `layout_search`: what fits.
"""

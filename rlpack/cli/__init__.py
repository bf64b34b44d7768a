"""The command `rlpack`.

- `main`: the subcommands and their exit codes. Each imports only what it needs, so that help and errors come fast.
- `train`: composes, validates and runs the jobs of a command line. `environment` checks what they need here,
  `sweep_dirs` removes the directory of a sweep that is refused.
- `job_commands`, `submit_checks`: `rlpack submit`, `jobs`, `logs` and `stop`, for jobs on a Ray cluster.
- `serve`, `serve_request`, `serve_model`, `serve_output`: `rlpack serve`, its checks, its run and what it prints.
- `plan_commands`, `plan_options`, `plan_from_run`: `rlpack plan` and `rlpack simulate`, which run no model.
- `signals`, `tables`, `error_text`: Ctrl-C, SIGTERM and closed pipes; text tables; error messages.
"""

"""Roles on a Ray cluster: placement, calls, payloads. The only package that imports Ray.

- `layout`, `context`: how a role's ranks divide rows and the model, and a rank's place among them.
- `dispatch`, `column_contract`, `trainable`: what a role's methods declare about their calls.
- `worker_group`, `calls`, `results`: the driver's half of a call.
- `ranks`, `submitted`, `rank_actor`, `process`, `shared_arguments`: the processes of a pool, and their calls.
- `answers`, `failures`, `rank_processes`: waiting for ranks, what goes wrong, and in which process.
- `ray_connection`, `ray_watch`: joining a Ray or starting one, and noticing that it ended or hangs.
- `ray_internals`: the private names of Ray, with replacements for versions that lack them.
- `local_ray`, `run_token`, `ray_daemons`, `ray_reaper`: a run's own Ray: its start, token, end, and what is left of it.
- `ray_store`, `object_handles`: payloads in the object store, their leases and their budget.
- `cluster`, `capacity`, `missing_nodes`, `shared_folder`, `start_roles`: pools of processes, and the roles on them.
- `jobs`: submitting a run to a cluster's job server.
"""

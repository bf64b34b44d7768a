"""Roles on a Ray cluster: placement, calls, payloads. The only package that imports Ray.

- `layout`, `context`: how a role's ranks divide rows and the model, and a rank's place among them.
- `dispatch`, `column_contract`, `trainable`: what a role's methods declare about their calls.
- `worker_group`, `calls`, `results`: the driver's half of a call.
- `ranks`, `submitted`, `rank_actor`, `process`, `failures`: the processes of a pool, their calls, and what goes wrong.
- `ray_store`, `object_handles`: payloads in the object store, their leases and their budget.
- `cluster`, `capacity`, `start_roles`: pools of processes, and the roles on them.
- `jobs`: submitting a run to a cluster's job server.
"""

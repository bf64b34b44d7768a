"""Preflight checks: a mistake is reported in seconds, before processes start or before the first step.

- `config_checks`: model, data and rewards against the configuration.
- `algorithm_checks`: the loss and the advantage function on a few example rows.
- `role_checks`: the classes of roles.
- `resource_checks`: the pools against this machine.
- `reward_smoke_test`: the scoring roles on a few demonstrations.
"""

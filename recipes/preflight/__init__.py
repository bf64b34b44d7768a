"""Preflight checks: a mistake is reported in seconds, before processes start or before the first step.

- `config_checks`: model, data, losses and rewards against the configuration.
- `role_checks`: the classes of roles.
- `resource_checks`: the pools against this machine.
- `reward_smoke_test`: the scoring roles on a few demonstrations.
"""

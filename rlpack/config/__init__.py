"""The configuration: the schema with every default, its rules, its composition and its reference page.

`schema` is the one home of keys, types, limits and defaults; Hydra's base node and docs/reference/config.md are made
from it. `compose` turns a command line into a plain mapping, `validate` that mapping into a `Config`, `rules` holds
what no single key can say, `secrets` what must not be written down, and `roles` what the sections mean for one role.
"""

"""The configuration: a schema with every default, rules across keys, composition, and generated pages.

- `schema` and `sections`: keys, types, limits and defaults; Hydra's base node is generated from them.
- `recipes`, `recipe_targets`: the recipe that runs, and the sections that it adds to the schema.
- `compose`, `validate`, `rules`, `reward_rules`, `warnings`: from a command line to a valid `Config`.
- `keys`, `foreign_names`: look keys up, and answer unknown ones.
- `roles`: what the sections mean for one role. `redaction`: which values must not be written down.
- `reference_page`, `migration_page`: docs/reference/config.md and docs/migration.md.
"""

"""The built-in roles: plain Python classes with one instance per rank, and the parts that they share.

`actor` and `critic` are trained; `reference` and `reward_model` run a frozen model; `rollout` generates; `reward` and
`judge` score texts. `build` makes and shards models, `inference` runs them over a shard, `loss` holds what is
minimized, and `optimizer_step` takes the steps. A user's own role looks like one of these.
"""

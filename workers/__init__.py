"""The built-in roles: plain Python classes with one instance per rank, and the parts that they share.

`actor` and `critic` are trained; `reference` and `reward_model` run a frozen model; `rollout` generates; `reward` and
`judge` score texts. `build` builds and shards models, `inference` runs them over a shard, `loss` defines the losses,
and `optimizer_step` minimizes them. A user's own role looks like one of these.
"""

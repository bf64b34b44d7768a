"""Models: loading, packed attention, token log-probabilities, sharding.

`loading` makes a model and its tokenizer, `attention` keeps packed sequences apart and `isolation` proves it,
`inputs` turns a microbatch into tensors, `policy` with `logprobs` scores tokens without ever holding all logits, and
`parallel` shards weights over ranks (FSDP2).
"""

"""Models: loading, packed attention, token log-probabilities, heads, adapters, optimizers, sharding.

- `loading` builds a model and its tokenizer; `stored_weights` compares it with a folder's files, and `cpu_products`
  speeds up its linear layers.
- `stored_model` and `new_model` give each rank its part of a model; `initialization` records how new weights are drawn.
- `attention` keeps packed sequences apart, and `checks` verifies it (`check_*`).
- `inputs` turns a microbatch into tensors.
- `packed` is the base of `policy` (log-probs, computed by `logprobs`) and `heads` (scalars).
- `adapters`, `patterns` and `optimizers` choose and train weights; `parallel` shards them over ranks (FSDP2).
- `flops` estimates the FLOPs of a sequence.
"""

"""Generation: token ids in, token ids and their log-probs out.

- `engine`: the protocol of generation engines, and the engines by name; `hf` is the engine that uses transformers.
- `types`: sampling parameters, generations, and trajectories of given and sampled segments.
- `sampling`: temperature, top-k and top-p, with one stream of random numbers per row.
- `assemble`: makes rows of the rollout batch from trajectories; no other code does.
- `decoding`, `decoders`, `direct_decoder`, `kv_cache`: how `hf` runs a model token by token; `whole_rows` compares the
  result with forward passes without a cache.
- `deterministic`: tests that rows don't depend on each other.
- `bucket_receiver`: checks the buckets of an update; `canary` then compares the engine's log-probs of fixed sequences
  with the trainer's.
"""

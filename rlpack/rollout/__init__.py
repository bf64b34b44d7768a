"""Generation: token ids in, token ids and their log-probs out.

- `engine`: the protocol of generation engines, and the engines by name; `hf` is the engine that uses transformers.
- `types`: sampling parameters, generations, and trajectories of given and sampled segments.
- `sampling`: temperature, top-k and top-p, with one stream of random numbers per row.
- `assemble`: makes rows of the rollout batch from trajectories; no other code does.
- `canary`: compares an engine's log-probs of a fixed prompt with the trainer's after every load.
"""

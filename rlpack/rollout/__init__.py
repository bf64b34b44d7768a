"""Generation: engines behind one protocol, token ids in, token ids and log-probs out.

`engine` is the protocol, `hf` an engine on transformers, `sampling` how a token is drawn from logits by a stream of
the row's own, and `assemble` makes a rollout batch of prompts and responses.
"""

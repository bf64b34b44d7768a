"""Names of the weight-transfer backend, for code that must not import vLLM."""

BACKEND = "rlpack_shared_memory"
EXTENSION = "rlpack.rollout.vllm.shared_weights.RegistersBackend"

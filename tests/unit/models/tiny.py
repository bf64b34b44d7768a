"""Tiny models of each supported kind, with large enough weights, soft caps and windows to expose mistakes."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpack.models import attention
from rlpack.models.inputs import ModelInputs

VOCABULARY = 53

KINDS: dict[str, tuple[str, dict]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 4}),
}


def tiny_model(
    kind: str = "qwen2",
    *,
    implementation: str = "rlpack",
    dtype: torch.dtype = torch.float64,
    seed: int = 7,
    **changes: object,
) -> PreTrainedModel:
    """Return a model whose weights depend on its kind only, not on the attention."""
    attention.register()
    model_type, settings = KINDS.get(kind, (kind, {}))
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "initializer_range": 0.25,
    }
    config = AutoConfig.for_model(model_type, **(shape | settings | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)


def offload_embedding(model: PreTrainedModel, device_type: str) -> list[str]:
    """Leave a model's first weight in host memory, as FSDP does with offloaded ones, of a mesh of other devices.

    Returns:
        The device types of the tokens that the language model gets later, which then fails with a `LookupError`.
    """
    mesh = DeviceMesh(device_type, [0], _init_backend=False, _rank=0)
    embedding = model.base_model.get_submodule("embed_tokens")
    whole = embedding.get_parameter("weight").detach()
    spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    embedding.weight = nn.Parameter(DTensor(whole, spec, requires_grad=False))  # pyright: ignore[reportCallIssue]
    devices: list[str] = []

    def record(module: nn.Module, arguments: tuple, options: dict) -> None:
        devices.append(options["input_ids"].device.type)
        raise LookupError("the tokens have been seen")

    model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    return devices


def tiny_rows(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def pad_rows(rows: list[Tensor], width: int) -> ModelInputs:
    """Lay rows out right-padded, one token at a time: slow, and independent of the planner's layouts."""
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    slots = []
    for index, row in enumerate(rows):
        for position, token in enumerate(row.tolist()):
            input_ids[index, position] = token
            slots.append(index * width + position)
    return ModelInputs(
        input_ids=input_ids,
        position_ids=torch.arange(width).expand(len(rows), width),
        packed=None,
        slots=torch.tensor(slots, dtype=torch.int64),
        row_lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
    )


def reference_scores(model: PreTrainedModel, row: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [L] of one row through the model's own attention and head, by definition."""
    scores = (model(row[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
    zero = scores.new_zeros(1)
    logprobs = torch.cat([zero, scores[:-1].gather(1, row[1:, None])[:, 0]])
    return logprobs, torch.cat([zero, -(scores.exp() * scores).sum(-1)[:-1]])

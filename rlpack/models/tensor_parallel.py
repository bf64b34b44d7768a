"""Tensor parallelism: each rank of a group holds a part of every layer's weights, as in Megatron-LM.

Source: Shoeybi et al. 2019, arXiv:1909.08053.

| weights | part of a rank | outputs |
|---|---|---|
| query, key and value projections, gate and up projections | rows: its heads, its intermediate channels | its own |
| latents of queries, keys and values (MLA) | all | used for its heads alone |
| output and down projections | columns | summands, added over ranks |
| embedding, output layer | rows: its tokens of the vocabulary | summands; logits of its own tokens |
| experts | whole experts: those of its share, for all tokens | summands |
| shared experts | as an MLP | summands, added with those of the experts |
| norms, routers, biases | all | |
| LoRA matrices | as their layer, but A of a split output, and B of a split input: all | |

Outside attention and MLP each rank keeps only its part of the tokens (sequence parallelism, Korthikanti et al. 2022,
arXiv:2205.05198): summands are reduce-scattered over tokens, and tokens all-gathered before attention and MLP.
Without it, every rank keeps all tokens, and summands are all-reduced.

Weights become DTensors over the group. FSDP then shards each along an axis that tensor parallelism leaves whole, so a
rank's part is always one block of the weight, and checkpoints load on any other layout.

Letters: T slots of a row, t = T / ranks, d hidden size, V vocabulary size.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rlpack.models.weight_split import WeightSplit

# Families whose layers have the names and meanings of `_WAYS`, as model_type.
FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "deepseek_v3"},
)

# How a module's weights are split, by the last part of its name; norms are recognized by their class.
_Way = Literal["rows", "columns", "vocabulary", "experts", "copied", "copied_rows", "token_norm", "scalar_head"]
_WAYS: dict[str, _Way] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), "rows"),
    **dict.fromkeys(("o_proj", "down_proj"), "columns"),
    **dict.fromkeys(("embed_tokens", "lm_head"), "vocabulary"),
    "experts": "experts",
    # Norms of heads, latents of DeepSeek's attention and routers: every rank has the weights, and uses the results for
    # its heads or experts alone.
    **dict.fromkeys(("q_norm", "k_norm", "gate"), "copied"),
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), "copied"),
    "head": "scalar_head",
}
# Modules that read all tokens.
_BLOCKS = ("self_attn", "mlp")


def split_problem(model: nn.Module) -> str | None:
    """Return why the weights of a model can't be split, None if they can."""
    config = cast(Any, model).config.get_text_config()
    if config.model_type not in FAMILIES:
        return f"tensor parallelism supports the model types {', '.join(sorted(FAMILIES))}"
    unknown = [name for name, module in model.named_modules() if any(_own(module)) and _way(name, module) is None]
    return f"there is no rule to split {unknown[0]}" if unknown else None


def uneven_weight(model: nn.Module, num_shards: int, *, experts: bool = True) -> tuple[str, int] | None:
    """Return the name of a weight that FSDP can't shard evenly over `num_shards` ranks, and the size of its axis.

    FSDP shards axes other than the first evenly only; these are the ones that tensor parallelism leaves whole.

    Args:
        model: a model of a family that `split_problem` accepts.
        num_shards: ranks that share a weight.
        experts: False leaves out experts, which expert parallelism divides among other ranks.
    """
    for name, module in model.named_modules():
        way = _way(name, module)
        if way == "experts" and not experts:
            continue
        for key, weight in _own(module):
            along_rows = way is not None and weight.ndim > 1 and _placement(way, weight) == Shard(0)
            if along_rows and weight.shape[1] % num_shards:
                return f"{name}.{key}", weight.shape[1]
    return None


def empty_part(model: nn.Module, num_ranks: int) -> tuple[str, int] | None:
    """Return the name of a weight of which some rank would get nothing, and the size of its axis.

    Ranks get equally large parts until nothing is left: of 9 rows, four ranks get 3, 3, 3 and 0. FSDP can't shard an
    empty part.

    Args:
        model: a model of a family that `split_problem` accepts.
        num_ranks: ranks that share the weights.
    """
    for name, module in model.named_modules():
        way = _way(name, module)
        if way is None:
            continue
        for key, weight in _own(module):
            placement = _placement(way, weight)
            if isinstance(placement, Shard):
                size = weight.shape[placement.dim]
                if (num_ranks - 1) * -(-size // num_ranks) >= size:
                    return f"{name}.{key}", size
    return None


def split_weights(root: nn.Module, split: WeightSplit) -> None:
    """Keep this rank's part of each weight, in place, and have modules compute with it.

    Args:
        root: a policy, critic or reward model, whose family `split_problem` accepts; weights are whole, on any device.
        split: the ranks that share the weights.
    """
    made: dict[int, nn.Parameter] = {}
    for name, module in list(root.named_modules()):
        last = name.rpartition(".")[2]
        with_experts = last in _BLOCKS and _has_experts(module)
        # Shared experts are added to the summands of the others before those are added over ranks.
        if with_experts or (_WAYS.get(last) == "columns" and not _is_in_experts_block(root, name)):
            module.register_forward_hook(lambda module, arguments, summands: split.add(summands))
        if last in _BLOCKS:
            module.register_forward_pre_hook(functools.partial(_gather_first, split), with_kwargs=True)
        if all(isinstance(weight, DTensor) for _, weight in _own(module)):
            continue  # no weights, or experts that expert parallelism has divided
        way = _way(name, module)
        assert way is not None, f"{name}: `split_problem` refuses modules without a rule"
        for key, weight in _own(module):
            if id(weight) not in made:  # tied weights stay tied
                made[id(weight)] = _part(weight, _placement(way, weight), split)
            module.register_parameter(key, made[id(weight)])
        _split_forward(module, way, split)


def _has_experts(module: nn.Module) -> bool:
    """Return whether a block routes tokens to experts."""
    return any(child == "experts" for child, _ in module.named_children())


def _is_in_experts_block(root: nn.Module, name: str) -> bool:
    """Return whether a module is part of a block that routes tokens to experts, such as a shared expert's layer."""
    names = name.split(".")
    blocks = (".".join(names[: place + 1]) for place, last in enumerate(names) if last in _BLOCKS)
    return any(_has_experts(root.get_submodule(block)) for block in blocks)


def sharded_axis(weight: Tensor) -> int:
    """Return the axis along which FSDP shards a weight: one that tensor parallelism leaves whole."""
    split = isinstance(weight, DTensor) and weight.ndim > 1 and Shard(0) in weight.placements
    return 1 if split else 0


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a module's own weights, without those of its children."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def _way(name: str, module: nn.Module) -> _Way | None:
    """Return how a module's weights are split; None if that isn't known."""
    names = name.split(".")
    if names[-1] == "base_layer":  # of a layer with an adapter
        return _WAYS.get(names[-2])
    if "lora_A" in names[-2:]:
        return "columns" if _WAYS.get(names[-3]) == "columns" else "copied"
    if "lora_B" in names[-2:]:
        return "copied_rows" if _WAYS.get(names[-3]) == "rows" else "copied"
    if names[-1] in _WAYS:
        return _WAYS[names[-1]]
    return "token_norm" if type(module).__name__.endswith("RMSNorm") else None


def _placement(way: _Way, weight: Tensor) -> Placement:
    """Return how a weight is divided among the ranks."""
    # FSDP needs an axis that stays whole, so vectors aren't split.
    if weight.ndim == 1 or way in {"copied", "copied_rows", "scalar_head"}:
        return Replicate()
    return Shard(1) if way == "columns" else Shard(0)


def _part(weight: nn.Parameter, placement: Placement, split: WeightSplit) -> nn.Parameter:
    """Return the DTensor of a whole weight, with a copy of this rank's part."""
    part = weight.detach()
    if isinstance(placement, Shard):
        start, stop = split.block(weight.shape[placement.dim])
        part = part.narrow(placement.dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    tensor = DTensor.from_local(
        part, split.mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return nn.Parameter(tensor, requires_grad=weight.requires_grad)


def _split_forward(module: nn.Module, way: _Way, split: WeightSplit) -> None:
    """Have a module compute with this rank's part of its weights."""
    if way == "vocabulary":
        rule = _embed if isinstance(module, nn.Embedding) else _logits
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            start, stop = split.block(module.num_embeddings)
            module.padding_idx = module.padding_idx - start if start <= module.padding_idx < stop else None
    else:
        if way == "experts":
            # transformers skips the experts of other ranks.
            experts = cast(Any, module)
            experts.num_experts, experts._is_expert_parallel = experts.num_experts // split.num_ranks, True
        rule = {
            "rows": _rows,
            "columns": _columns,
            "copied_rows": _copied_rows,
            "experts": _experts,
            "copied": _copied,
            "token_norm": _token_norm,
            "scalar_head": _scalar_head,
        }[way]
    module.forward = functools.partial(rule, module, module.forward, split)


_Forward = Callable[[Tensor], Tensor]


def _rows(module: nn.Linear, forward: _Forward, split: WeightSplit, states: Tensor) -> Tensor:
    """Return this rank's outputs: [1, T, d] to [1, T, its rows]."""
    start, stop = split.block(module.out_features)
    bias = None if module.bias is None else split.local(module.bias, summands=True)[start:stop]
    with _weights(module, weight=split.local(module.weight), bias=bias):
        return forward(states)


def _columns(module: nn.Linear, forward: _Forward, split: WeightSplit, states: Tensor) -> Tensor:
    """Return this rank's summand of the outputs, from its channels of all tokens: [1, T, d]."""
    # One rank adds the bias; the others multiply it by zero, so that it has a gradient everywhere.
    bias = None if module.bias is None else split.local(module.bias, summands=True) * float(split.rank == 0)
    with _weights(module, weight=split.local(module.weight), bias=bias):
        return forward(states)


def _copied_rows(module: nn.Linear, forward: _Forward, split: WeightSplit, states: Tensor) -> Tensor:
    """Return this rank's outputs from a weight that every rank has whole."""
    start, stop = split.block(module.out_features)
    with _weights(module, weight=split.local(module.weight, summands=True)[start:stop]):
        return forward(states)


def _embed(module: nn.Embedding, forward: _Forward, split: WeightSplit, tokens: Tensor) -> Tensor:
    """Return the embeddings of this rank's tokens: [1, T] to [1, t, d]."""
    start, stop = split.block(module.num_embeddings)
    others = (tokens < start) | (tokens >= stop)
    with _weights(module, weight=split.local(module.weight)):
        states = forward((tokens - start).masked_fill(others, 0))
    return split.add(states.masked_fill(others[..., None], 0.0))


def _logits(module: nn.Linear, forward: _Forward, split: WeightSplit, states: Tensor) -> Tensor:
    """Return the logits of the whole vocabulary; only a model's own forward pass calls this."""
    return split.gather_logits(_rows(module, forward, split, split.gather(states)), module.out_features)


def _experts(
    module: nn.Module,
    forward: Callable[..., Tensor],
    split: WeightSplit,
    states: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return the summand of this rank's experts, for all tokens.

    Args:
        module: its `num_experts` is the number of this rank's experts.
        forward: the module's forward pass.
        split: the ranks that share the experts.
        states: [T, d].
        index: experts of each token, int64 [T, k].
        weights: weights of these experts, [T, k].
    """
    count = cast(int, module.num_experts)
    own = index - split.rank * count
    others = (own < 0) | (own >= count)
    parts = {name: split.local(weight) for name, weight in _own(module)}
    with _weights(module, **parts):
        # transformers skips experts with the index `num_experts`, if their weight is zero.
        summand = forward(states, own.masked_fill(others, count), weights.masked_fill(others, 0.0))
    if torch.is_grad_enabled() and not summand.requires_grad:
        # No token is routed here, and the result is a constant. This rank still takes part in the backward pass, in
        # which ranks communicate.
        summand = summand + 0.0 * sum(tensor.sum() for tensor in (states, weights, *parts.values()))
    return summand


def _copied(module: nn.Module, forward: _Forward, split: WeightSplit, states: Tensor) -> Tensor:
    """Apply weights that every rank has to its heads, or to all tokens for its experts."""
    with _weights(module, **{name: split.local(weight, summands=True) for name, weight in _own(module)}):
        return forward(states)


def _token_norm(module: nn.Module, forward: _Forward, split: WeightSplit, states: Tensor) -> Tensor:
    """Normalize this rank's tokens."""
    weights = {name: split.local(weight, summands=split.splits_tokens) for name, weight in _own(module)}
    with _weights(module, **weights):
        return forward(states)


def _scalar_head(module: nn.Module, forward: _Forward, split: WeightSplit, states: Tensor) -> Tensor:
    """Apply a head that every rank holds whole to all tokens."""
    with _weights(module, **{name: split.local(weight) for name, weight in _own(module)}):
        return forward(states)


def _gather_first(split: WeightSplit, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Give attention or an MLP the states of all tokens."""
    if "hidden_states" in options:
        return arguments, options | {"hidden_states": split.gather(options["hidden_states"])}
    return (split.gather(arguments[0]), *arguments[1:]), options


@contextmanager
def _weights(module: nn.Module, **parts: Tensor | None) -> Iterator[None]:
    """Replace a module's weights inside the context; unlike parameters, replacements may have an autograd history."""
    before = dict(module._parameters)
    module._parameters.update(cast(Any, parts))
    try:
        yield
    finally:
        module._parameters.update(before)

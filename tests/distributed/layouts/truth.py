"""What each case has to give: one row at a time through transformers' own forward in float64, summed in Python."""

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlpack.batch.batch import BatchedDataDict
from tests.builders import MODEL, tiny_tokenizer
from tests.distributed.definition import plain_model, row_scores, step_by_definition
from tests.distributed.layouts.cases import (
    CRITIC,
    RATE,
    SIZES,
    TEMPERATURE,
    Case,
    algorithm,
    batch_of,
    config_of,
)


@dataclass(frozen=True)
class Result:
    """The result of a case.

    Attributes:
        scores: log-probs of response tokens, values before them, or rewards of rows.
        metrics: of one optimizer step; none for a role that is not trained.
        gradients: of that step, by the names of the weights.
    """

    scores: Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def batch_with_values(family: str) -> BatchedDataDict:
    """Return a family's batch with values around those of its critic, some beyond the clip range, and returns."""
    batch = batch_of(family)
    generator = torch.Generator().manual_seed(2)
    model, mask = plain_model(config_of(family)), batch["response_mask"]
    with torch.no_grad():
        own = torch.cat([_values(model, new_head(), torch.zeros(1), row) for row in batch["input_ids"].rows()])
    old = (own + 0.2 * torch.randn(own.shape, generator=generator)).float() * mask.values
    returns = (own + torch.randn(own.shape, generator=generator)).float() * mask.values
    return batch.union({"values": mask.with_values(old), "returns": mask.with_values(returns)})


def new_head() -> Tensor:
    """Return the weights of the critic's head."""
    return torch.randn(1, MODEL["hidden_size"], generator=torch.Generator().manual_seed(11)) / 6


@functools.cache
def expected(case: Case, classifier: str) -> Result:
    """Return the truth of a case, the same for every mode and layout."""
    return (
        {"actor": _actor, "sft": _sft, "critic": _critic}[case.role](case.family)
        if (case.role != "reward_model")
        else _rewards(case.family, classifier)
    )


def _actor(family: str) -> Result:
    """Return the actor's log-probs at the sampling temperature, and a step of its policy loss."""
    batch, model = batch_with_values(family), plain_model(config_of(family))
    scores = _logprobs(model, batch, TEMPERATURE)
    metrics = step_by_definition(model, batch, range(len(SIZES)), algorithm(family), TEMPERATURE, RATE)
    return Result(scores, metrics, _gradients(model))


def _sft(family: str) -> Result:
    """Return log-probs at temperature 1, and a step of maximum likelihood."""
    batch, model = batch_with_values(family), plain_model(config_of(family))
    scores = _logprobs(model, batch, 1.0)
    rows = [
        row_scores(model, tokens, 1.0)[0][mask]
        for tokens, mask, valid in zip(
            batch["input_ids"].rows(), batch["response_mask"].rows(), batch["valid"], strict=True
        )
        if valid
    ]
    loss = -torch.cat(rows).mean()
    loss.backward()
    gradients = _gradients(model)
    return Result(scores, {"actor/loss": loss.item()} | _of_optimizer("actor", gradients), gradients)


def _critic(family: str) -> Result:
    """Return the critic's values, and a step of its clipped squared error."""
    batch, model = batch_with_values(family), plain_model(config_of(family))
    head = new_head().double().requires_grad_(True)
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    assert CRITIC.value_clip is not None
    losses, means, clipped, values = [], [], [], []
    for row, tokens in enumerate(batch["input_ids"].rows()):
        mask = batch["response_mask"].rows()[row]
        whole = _values(model, head, bias, tokens)
        values.append(whole.detach() * mask)
        if not batch["valid"][row]:
            continue
        new, old, target = whole[mask], *(batch[name].rows()[row][mask].double() for name in ("values", "returns"))
        bounded = old + (new - old).clamp(-CRITIC.value_clip, CRITIC.value_clip)
        plain, other = (new - target) ** 2, (bounded - target) ** 2
        losses.append(0.5 * torch.maximum(plain, other))
        clipped.append(other > plain)
        means.append(new)
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {f"model.{name}": p.grad for name, p in model.base_model.named_parameters() if p.grad is not None}
    assert head.grad is not None
    assert bias.grad is not None
    gradients |= {"head.weight": head.grad, "head.bias": bias.grad}
    metrics = {
        "critic/loss": loss.item(),
        "critic/value_mean": torch.cat(means).mean().item(),
        "critic/clip_fraction": torch.cat(clipped).double().mean().item(),
    }
    return Result(torch.cat(values), metrics | _of_optimizer("critic", gradients), gradients)


def _rewards(family: str, classifier: str) -> Result:
    """Return the weighted score of each row by transformers' own classifier."""
    model = AutoModelForSequenceClassification.from_pretrained(classifier, attn_implementation="eager").double()
    model.set_experts_implementation("eager")
    model.config.pad_token_id = tiny_tokenizer().pad_token_id
    with torch.no_grad():
        rows = batch_with_values(family)["input_ids"].rows()
        return Result(torch.cat([2.0 * model(input_ids=row[None], use_cache=False).logits[0] for row in rows]))


def _logprobs(model: torch.nn.Module, batch: BatchedDataDict, temperature: float) -> Tensor:
    with torch.no_grad():
        rows = [row_scores(model, row, temperature)[0] for row in batch["input_ids"].rows()]
    return torch.cat(rows) * batch["response_mask"].values


def _values(model: torch.nn.Module, head: Tensor, bias: Tensor, tokens: Tensor) -> Tensor:
    """Return the value before each token of a row, f64 [L]."""
    hidden = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    return torch.cat([hidden.new_zeros(1), (hidden @ head.double().T)[:, 0] + bias])[:-1]


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _of_optimizer(role: str, gradients: dict[str, Tensor]) -> dict[str, float]:
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    return {f"{role}/grad_norm": norm, f"{role}/learning_rate": RATE, f"{role}/skipped_steps": 0.0}

"""A reference update by definition: one row at a time in float64 through the model's own head, summed in Python.

Nothing of rlpack's losses, weights or packing is used: it is their ground truth.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm, Config
from rlpack.models.loading import build_causal_lm
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer, with_prompts_by_length


@dataclass(frozen=True)
class RowLoss:
    """The losses of a row's counted tokens, their ratios, and whether a bound removed the gradient."""

    losses: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor


def plain_model(config: Config | None = None) -> torch.nn.Module:
    """Return the initial model of every actor, in float64 and with transformers' own attention."""
    tokenizer, config = tiny_tokenizer(), config or tiny_config()
    model = build_causal_lm(
        config.model,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=config.seed,
        attention_name="eager",
    )
    model.set_experts_implementation("eager")  # its grouped products have no float64
    return model.double()


def row_scores(model: torch.nn.Module, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [L] of one row by definition."""
    scores = (model(tokens[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
    zero = scores.new_zeros(1)
    logprobs = torch.cat([zero, scores[:-1].gather(1, tokens[1:, None])[:, 0]])
    return logprobs, torch.cat([zero, -(scores.exp() * scores).sum(-1)[:-1]])


def scored(
    sizes: list[tuple[int, int]], quarantined: int | None, temperature: float, config: Config | None = None
) -> BatchedDataDict:
    """Return a rollout batch with advantages, and old and reference log-probs near the policy's own.

    Rows with prompts of one length have the same prompt.
    """
    batch = with_prompts_by_length(tiny_rollouts(sizes))
    generator = torch.Generator().manual_seed(1)
    mask, model = batch["response_mask"], plain_model(config)
    with torch.no_grad():
        own = torch.cat([row_scores(model, row, temperature)[0] for row in batch["input_ids"].rows()]).float()
    per_row = torch.randn(batch.num_rows, generator=generator) + 0.4
    old, reference = own + 0.3 * torch.randn(2, own.shape[0], generator=generator)
    return batch.keep(["input_ids", "response_mask"]).union(
        {
            "valid": torch.arange(batch.num_rows) != (-1 if quarantined is None else quarantined),
            "logprobs": mask.with_values(old * mask.values),
            "reference_logprobs": mask.with_values(reference * mask.values),
            "advantages": per_row,
        }
    )


def counts_of(batch: BatchedDataDict) -> Tensor:
    """Return the tokens of each row that count, int64 [B]."""
    return torch.tensor([int(row.sum()) for row in batch["response_mask"].rows()]).where(batch["valid"], 0)


def row_loss(new: Tensor, old: Tensor, advantage: Tensor, settings: Algorithm, statistics: dict[str, float]) -> RowLoss:
    """Return the loss of each counted token of one row, from the papers' formulas.

    Args:
        new: log-probs under the policy, with gradient, f64 [n].
        old: under the old policy, f64 [n].
        advantage: of the row, f64 [].
        settings: the loss and its bounds.
        statistics: of the optimizer step, where the loss asks for some.
    """
    ratio, none = (new - old).exp(), torch.zeros_like(new, dtype=torch.bool)
    lowest, highest = 1 - settings.clip_low, 1 + settings.clip_high
    arguments = settings.loss_arguments
    if settings.loss == "reinforce":
        return RowLoss(-advantage * new, ratio, none, none)
    if settings.loss == "cispo":
        return RowLoss(-ratio.detach().clamp(lowest, highest) * advantage * new, ratio, none, none)
    if settings.loss == "sapo":
        tau = arguments["tau_positive"] if advantage > 0 else arguments["tau_negative"]
        return RowLoss(-(4 / tau) / (1 + (-tau * (ratio - 1)).exp()) * advantage, ratio, none, none)
    if settings.loss == "kl_cov":
        centered = (new.detach() - statistics["logprob_mean"]) * (advantage - statistics["advantage_mean"])
        held = centered >= statistics["threshold"]
        return RowLoss(-ratio * advantage + held * arguments["coef"] * (new - old).abs(), ratio, none, held)
    if settings.loss in ("gmpo", "dppo_tv", "dppo_kl"):
        return (_gmpo if settings.loss == "gmpo" else _dppo)(new, old, advantage, settings)
    if settings.loss == "gspo":
        ratio = ((new - old).sum() / max(1, new.numel())).exp().expand(new.shape)
    bounded = torch.minimum(ratio * advantage, ratio.clamp(lowest, highest) * advantage)
    if settings.dual_clip is not None and advantage < 0:
        bounded = torch.maximum(bounded, settings.dual_clip * advantage)
    low, high = (ratio < lowest) & (advantage < 0), (ratio > highest) & (advantage > 0)
    return RowLoss(-bounded, ratio, low, high)


def _dppo(new: Tensor, old: Tensor, advantage: Tensor, settings: Algorithm) -> RowLoss:
    """Return the masked policy gradient of DPPO, from two Bernoulli distributions per token."""
    ratio, p, q = (new - old).exp(), new.detach().exp(), old.exp()
    moved = (p - q).abs()  # the total variation
    if settings.loss == "dppo_kl":
        moved = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    low = (p < q) & (moved > settings.clip_low) if advantage <= 0 else torch.zeros_like(p, dtype=torch.bool)
    high = (p > q) & (moved > settings.clip_high) if advantage > 0 else torch.zeros_like(p, dtype=torch.bool)
    weight = ratio.detach().clamp(max=settings.loss_arguments["max_ratio"]) * ~(low | high)
    return RowLoss(-weight * advantage * new, ratio, low, high)


def _gmpo(new: Tensor, old: Tensor, advantage: Tensor, settings: Algorithm) -> RowLoss:
    """Return the loss of GMPO: equation 4 of the paper, a product of clipped terms to the power of 1/n."""
    ratio, low, high = (new - old).exp(), math.exp(-settings.clip_low), math.exp(settings.clip_high)
    terms = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).abs()
    objective = advantage.sign() * terms.prod() ** (1 / max(1, ratio.numel()))
    return RowLoss(
        -objective.expand(ratio.shape), ratio, (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
    )


def covariances(new: list[Tensor], advantages: list[Tensor], share: float) -> dict[str, float]:
    """Return the statistics of KL-Cov for a step, sorted in plain Python."""
    logprobs = [value for row in new for value in row.tolist()]
    values = [float(a) for row, a in zip(new, advantages, strict=True) for _ in range(row.numel())]
    means = sum(logprobs) / len(logprobs), sum(values) / len(values)
    products = sorted(((p - means[0]) * (a - means[1]) for p, a in zip(logprobs, values, strict=True)), reverse=True)
    count = max(1, int(share * len(products)))
    threshold = (products[count - 1] + products[count]) / 2
    return {"logprob_mean": means[0], "advantage_mean": means[1], "threshold": threshold}


def aggregated(per_row: list[Tensor], settings: Algorithm) -> Tensor:
    """Aggregate the values of each row's counted tokens into one number."""
    rows = [values for values in per_row if values.numel()]
    if settings.aggregation == "token_mean":
        return torch.cat(rows).mean()
    if settings.aggregation == "seq_mean_token_mean":
        return torch.stack([values.mean() for values in rows]).mean()
    if settings.aggregation == "seq_mean_token_sum":
        return torch.stack([values.sum() for values in rows]).mean()
    if settings.aggregation == "token_sum":
        return torch.cat(rows).sum()
    assert settings.aggregation_constant is not None
    return torch.stack([values.sum() for values in rows]).sum() / (settings.aggregation_constant * len(rows))


def kl_of(new: Tensor, reference: Tensor, settings: Algorithm) -> Tensor:
    """Return the KL term at each token, with the gradient that the settings select."""
    difference = new - reference
    k3 = ((-difference).exp() - 1 + difference).clamp(max=settings.k3_bound)
    kinds = {"k1": difference, "k2": difference**2 / 2, "k3": k3, "abs": difference.abs()}
    value = kinds[settings.kl_estimator]
    return value.detach() + kinds["k2"] - kinds["k2"].detach() if settings.kl_straight_through else value


def step_by_definition(
    model: torch.nn.Module,
    batch: BatchedDataDict,
    rows: range,
    settings: Algorithm,
    temperature: float,
    rate: float,
    importance: list[Tensor] | None = None,
) -> dict[str, float]:
    """Take a plain gradient step on `rows`, leave its gradient in `model`, and return the metrics.

    `importance` holds a factor for the policy loss of each token of the batch's rows, f64 [L] per row.
    """
    names = ("input_ids", "response_mask", "logprobs", "reference_logprobs")
    columns = {name: batch[name].rows() for name in names}
    masks = [columns["response_mask"][row] & batch["valid"][row] for row in rows]
    found = [row_scores(model, columns["input_ids"][row], temperature) for row in rows]
    new, entropy = ([pair[part][mask] for pair, mask in zip(found, masks, strict=True)] for part in range(2))
    old, reference = (
        [columns[name][row][mask].double() for row, mask in zip(rows, masks, strict=True)] for name in names[2:]
    )
    advantages = [batch["advantages"][row].double() for row in rows]
    needed = settings.loss == "kl_cov"
    statistics = covariances(new, advantages, settings.loss_arguments["share"]) if needed else {}
    results = [row_loss(*row, settings, statistics) for row in zip(new, old, advantages, strict=True)]
    losses = [row.losses for row in results]
    if importance is not None:
        losses = [loss * importance[row][mask] for loss, row, mask in zip(losses, rows, masks, strict=True)]
    policy_loss = aggregated(losses, settings)
    kl = [kl_of(*row, settings) for row in zip(new, reference, strict=True)]
    loss = policy_loss + settings.kl_coef * aggregated(kl, settings)
    loss = loss - settings.entropy_coef * aggregated(entropy, settings)
    model.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
    ratios, bounded = torch.cat([row.ratio for row in results]), {}
    if settings.kl_estimator == "k3":
        at_bound = torch.cat(kl) >= settings.k3_bound
        bounded["actor/kl_bounded_fraction"] = at_bound.double().mean().item()
    if settings.correction.skips_old_logprobs:  # `old` are then the sampler's
        gap = (torch.cat(new) - torch.cat(old)).abs().mean()
        bounded["actor/logprob_gap"] = gap.item()
    return bounded | {
        "actor/loss": loss.item(),
        "actor/policy_loss": policy_loss.item(),
        "actor/kl": torch.cat(kl).mean().item(),
        "actor/entropy": torch.cat(entropy).mean().item(),
        "actor/ratio_mean": ratios.mean().item(),
        "actor/ratio_max": ratios.max().item(),
        "actor/clip_low_fraction": torch.cat([row.low for row in results]).double().mean().item(),
        "actor/clip_high_fraction": torch.cat([row.high for row in results]).double().mean().item(),
        "actor/grad_norm": torch.cat([gradient.flatten() for gradient in gradients]).norm().item(),
        "actor/learning_rate": rate,
        "actor/skipped_steps": 0.0,
    }


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative distance of a tensor from its expected value."""
    assert list(found) == list(expected)
    return max(((found[name] - truth).norm() / truth.norm()).item() for name, truth in expected.items())

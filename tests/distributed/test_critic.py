"""Values, advantages and the critic's update are those of one row at a time, however each role batches.

The truth is in float64, through the wrapped model alone, with the recursions written out in Python.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.builders import MODEL, tiny_tokenizer
from tests.distributed import critics
from tests.distributed.critics import KL_COEF, MODES, SETTINGS, TEMPERATURE, new_head
from tests.distributed.definition import difference, plain_model, row_scores, scored
from tests.distributed.processes import on_ranks

# The third response is empty; the sixth row is quarantined.
SIZES = [(3, 9), (5, 1), (4, 0), (2, 21), (7, 6), (3, 8), (1, 4)]
BATCH = scored(SIZES, 5, TEMPERATURE).drop(["advantages", "reference_logprobs"])
RATE = 0.05


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny sequence classifier, as a folder."""
    settings = {key: value for key, value in MODEL.items() if key != "model_type"}
    config = AutoConfig.for_model(MODEL["model_type"], vocab_size=len(tiny_tokenizer()), num_labels=1, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForSequenceClassification.from_config(config)
    folder = tmp_path_factory.mktemp("classifier")
    model.save_pretrained(folder)
    return folder


def values_of(model: torch.nn.Module, head: Tensor, tokens: Tensor) -> Tensor:
    """Return the value before each token of a row, f64 [L]."""
    hidden = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    return torch.cat([hidden.new_zeros(1), (hidden @ head.double().T)[:, 0]])[:-1]


def advantages_of(values: list[float], rewards: list[float]) -> list[float]:
    """Return the advantages of a row's response, by the recursion from its end."""
    found, following, later = [], 0.0, 0.0
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        later = reward + SETTINGS.gamma * following - value + SETTINGS.gamma * SETTINGS.gae_lambda * later
        found.append(later)
        following = value
    return found[::-1]


def by_definition(classifier: Path) -> dict[str, np.ndarray]:
    """Return the expected columns, from one row at a time."""
    model, rewarder = plain_model(), AutoModelForSequenceClassification.from_pretrained(classifier).double()
    rewarder.config.pad_token_id = tiny_tokenizer().pad_token_id
    head = new_head(MODEL["hidden_size"])
    names = ("advantages", "returns", "values", "rewards", "kl_sum")
    found: dict[str, list[float]] = {name: [] for name in names}
    with torch.no_grad():
        for row, tokens in enumerate(BATCH["input_ids"].rows()):
            mask = BATCH["response_mask"].rows()[row]
            values = values_of(model, head, tokens) * mask
            gap = BATCH["logprobs"].rows()[row].double() - row_scores(model, tokens, TEMPERATURE)[0]
            kl = (-gap).expm1() + gap
            reward = 2.0 * rewarder(input_ids=tokens[None], use_cache=False).logits[0, 0].item()
            found["values"] += values.tolist()
            found["rewards"].append(reward)
            found["kl_sum"].append(kl[mask].sum().item())
            advantages, returns = torch.zeros(2, len(tokens), dtype=torch.float64)
            if BATCH["valid"][row] and mask.any():
                paid = (-KL_COEF * kl[mask]).tolist()
                paid[-1] += reward
                advantages[mask] = torch.tensor(advantages_of(values[mask].tolist(), paid), dtype=torch.float64)
                returns[mask] = advantages[mask] + values[mask]
            found["advantages"] += advantages.tolist()
            found["returns"] += returns.tolist()
    return {name: np.array(column) for name, column in found.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_advantages_are_those_of_each_row_alone_in_all_combinations_of_modes(
    size: int, classifier: Path, tmp_path: Path
) -> None:
    truth = by_definition(classifier)
    combinations = on_ranks(tmp_path, size, critics.all_combinations, BATCH, str(classifier))[0]
    assert set(combinations) == set(itertools.product(MODES, MODES, MODES))
    assert np.abs(truth["advantages"]).max() > 0.5
    for key, found in combinations.items():
        for name, expected in truth.items():
            assert found[name] == pytest.approx(expected, rel=2e-5, abs=2e-5), (key, name)
        sums = {name: column.sum() for name, column in found["sums"].items()}
        assert sums["advantage_sum"] == pytest.approx(truth["advantages"].sum(), rel=1e-5)
        assert sums["return_squares"] == pytest.approx((truth["returns"] ** 2).sum(), rel=1e-5)


def update_by_definition(values_before: Tensor, returns: Tensor) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and gradients of one step of the critic, from one row at a time."""
    model = plain_model()
    head = new_head(MODEL["hidden_size"]).double().requires_grad_(True)
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    losses, seen, held, start = [], [], [], 0
    for row, tokens in enumerate(BATCH["input_ids"].rows()):
        here, mask = slice(start, start + len(tokens)), BATCH["response_mask"].rows()[row]
        start += len(tokens)
        if not BATCH["valid"][row] or not mask.any():
            continue
        hidden = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        new = torch.cat([hidden.new_zeros(1), (hidden @ head.T)[:, 0] + bias])[:-1][mask]
        old, target = values_before[here][mask].double(), returns[here][mask].double()
        bounded = old + (new - old).clamp(-SETTINGS.value_clip, SETTINGS.value_clip)
        plain, other = (new - target) ** 2, (bounded - target) ** 2
        losses.append(0.5 * torch.maximum(plain, other))
        held.append(other > plain)
        seen.append(new)
    loss = torch.cat(losses).mean()
    loss.backward()
    grads = {f"model.{n}": p.grad for n, p in model.base_model.named_parameters() if p.grad is not None}
    grads |= {"head.weight": head.grad, "head.bias": bias.grad}
    norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
    metrics = {
        "critic/loss": loss.item(),
        "critic/value_mean": torch.cat(seen).mean().item(),
        "critic/clip_fraction": torch.cat(held).double().mean().item(),
        "critic/grad_norm": norm,
        "critic/learning_rate": RATE,
        "critic/skipped_steps": 0.0,
    }
    return metrics, grads


def test_an_update_is_that_of_the_definition_however_its_batch_is_cut(tmp_path: Path) -> None:
    mask = torch.cat(BATCH["response_mask"].rows())
    generator = torch.Generator().manual_seed(2)
    model, head = plain_model(), new_head(MODEL["hidden_size"])
    with torch.no_grad():
        own = torch.cat([values_of(model, head, tokens) for tokens in BATCH["input_ids"].rows()])
    # Old values so far from the critic's that the bound holds some and not others.
    old = (own + 0.2 * torch.randn(own.shape, generator=generator)).float() * mask
    returns = (own + torch.randn(own.shape, generator=generator)).float() * mask
    like = BATCH["response_mask"]
    batch = BATCH.union({"values": like.with_values(old), "returns": like.with_values(returns)})
    truth, gradients = update_by_definition(old, returns)
    assert 0.1 < truth["critic/clip_fraction"] < 0.9
    cases = list(itertools.product(MODES, (1, 2, 4)))
    for size in (1, 2):
        outcomes = on_ranks(tmp_path, size, critics.updates, batch, cases, RATE)[0]
        for case, (metrics, arrays) in zip(cases, outcomes, strict=True):
            assert metrics == [pytest.approx(truth, rel=1e-5, abs=1e-7)], (case, size)
            found = {name: torch.from_numpy(array) for name, array in arrays.items()}
            assert difference(dict(sorted(found.items())), dict(sorted(gradients.items()))) < 1e-5, (case, size)

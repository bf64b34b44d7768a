"""A mixture of experts trains alike on one rank, and on two that divide its experts."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.commands import Command, curve, done
from tests.end_to_end.settings import REFERENCE, UNEVEN

pytestmark = [pytest.mark.ray, pytest.mark.slow]
MIXTURE = (
    *UNEVEN,
    *REFERENCE,
    *("model.config.model_type=mixtral", "+model.config.num_local_experts=4", "+model.config.num_experts_per_tok=2"),
    *("model.config.intermediate_size=96", "sft_warmup.steps=4", "trainer.steps=2"),
    *("actor.moe.balance_coefficient=0.01", "actor.moe.replay_routing=true"),
)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Command:
    return done(tmp_path_factory.mktemp("one"), *MIXTURE, ranks=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Command:
    return done(tmp_path_factory.mktemp("two"), *MIXTURE, "actor.parallel.ep=2", ranks=2)


METRICS = ("reward/mean", "actor/loss", "actor/kl", "actor/entropy", "actor/grad_norm")
OF_ROUTING = ("actor/moe_balance_loss", "actor/moe_load_imbalance")


@pytest.mark.parametrize("name", [*METRICS, *OF_ROUTING])
def test_losses_and_gradients_are_those_of_one_rank_up_to_rounding(one: Command, two: Command, name: str):
    assert curve(two.run_dir, name) == pytest.approx(curve(one.run_dir, name), rel=2e-3, abs=2e-5)


def test_replayed_routing_is_that_of_the_old_log_probs(two: Command):
    changed = curve(two.run_dir, "actor/moe_replay_changed")
    assert len(changed) == 2
    assert 0 <= max(changed) < 0.2  # of small steps; of other tokens' experts it would be some 0.8


def test_rollouts_come_from_the_weights_that_are_trained(two: Command):
    assert max(curve(two.run_dir, "rollout/logprob_gap")) < 1e-4


def test_the_exported_model_is_that_of_one_rank_up_to_rounding(one: Command, two: Command):
    models = [AutoModelForCausalLM.from_pretrained(run.run_dir / "model", dtype=torch.float32) for run in (one, two)]
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        first, second = (model(input_ids=tokens).logits.log_softmax(-1) for model in models)
    assert (first - second).abs().max() < 2e-3

"""An actor alone, in this process."""

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Actor, Algorithm, Config, Model, Optimizer, Rollout
from rlpack.config.sections.correction_settings import Correction
from rlpack.distributed.context import RankContext
from rlpack.models import attention
from rlpack.models.errors import IsolationError
from rlpack.packing import Batching, make_plan
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import Moments, PolicyGradientLoss, SFTLoss
from rlpack.workers.reference import ReferenceWorker
from tests.builders import MODEL, exported_weights, tiny_config, tiny_rollouts, tiny_tokenizer

SIZES = [(3, 9), (5, 1), (2, 6)]


pytestmark = pytest.mark.usefixtures("process_group")


def actor_of(config: Config) -> ActorWorker:
    return ActorWorker.from_settings(RankContext(), config, tiny_tokenizer())


def shard_of(batch: BatchedDataDict) -> BatchedDataDict:
    (shard,) = batch.shard_by_batch_size(1, sequence_packing={"max_tokens": 32})
    return shard


def lesson() -> BatchedDataDict:
    batch = tiny_rollouts(SIZES).keep(["input_ids", "response_mask"])
    share = torch.full((batch.num_rows,), 1 / batch["response_mask"].values.sum())
    return batch.union({"loss_weight": share, "token_weight": share})


def policy_update(actor: ActorWorker) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Take one policy step and return its metrics and the weights after it."""
    batch = lesson()
    old = batch.restore([actor.logprobs(shard_of(batch))]).keep(["logprobs"])
    advantages = torch.ones(batch.num_rows)
    batch = batch.union(dict(old) | {"advantages": advantages})
    (metrics,) = actor.train_step(shard_of(batch), PolicyGradientLoss(Algorithm(), temperature=1.0))
    return metrics, exported_weights(actor)


ON_POLICY = Algorithm(kl_coef=0.2, entropy_coef=0.1)


def on_policy_batch(actor: ActorWorker) -> BatchedDataDict:
    """Return a batch of which the second row doesn't train."""
    rollouts = tiny_rollouts(SIZES).keep(["input_ids", "response_mask", "rollout_logprobs"])
    share = torch.tensor([1 / 15, 0.0, 1 / 15])
    mask = rollouts["response_mask"]
    generator = torch.Generator().manual_seed(4)
    advantages = torch.randn(mask.values.shape, generator=generator)
    reference = mask.with_values(torch.where(mask.values, -2 * torch.rand(mask.values.shape, generator=generator), 0.0))
    weights = {"loss_weight": share, "token_weight": share}
    return rollouts.union(weights | {"advantages": mask.with_values(advantages), "reference_logprobs": reference})


def loss_of(**settings: Any) -> PolicyGradientLoss:
    return PolicyGradientLoss(ON_POLICY, temperature=1.0, **settings)


def test_a_single_update_without_old_log_probs_is_the_one_with_them_bit_for_bit():
    actors = [actor_of(tiny_config(algorithm=ON_POLICY)) for _ in range(2)]
    batch = on_policy_batch(actors[0])
    old = batch.restore([actors[0].logprobs(shard_of(batch))])
    columns = batch.union(old.keep(["logprobs"]))
    sums = batch.restore([actors[0].kl_sums(shard_of(columns), "k3", ON_POLICY.k3_bound)])["kl_sum"]
    (expected,) = actors[0].train_step(shard_of(columns.drop(["rollout_logprobs"])), loss_of(), 0.1)
    (metrics,) = actors[1].train_step(shard_of(batch), loss_of(on_policy=True, responses=2), 0.1)
    trains = torch.tensor([True, False, True])
    gap = old["logprob_gap"][trains].sum() / old["response_tokens"][trains].sum()
    assert metrics.pop("actor/logprob_gap") == pytest.approx(gap.item(), rel=1e-6)
    assert metrics.pop("actor/response_kl") == pytest.approx(sums[trains].mean().item(), rel=1e-6)
    assert metrics == expected
    assert metrics["actor/grad_norm"] > 0
    one, other = (exported_weights(actor) for actor in actors)
    assert all((one[name] == other[name]).all() for name in one)


def test_an_update_with_the_samplers_log_probs_measures_their_gap_to_its_own():
    algorithm = ON_POLICY.model_copy(update={"correction": Correction(bypass=True)})
    actor = actor_of(tiny_config(algorithm=algorithm))
    batch = on_policy_batch(actor)
    own = batch.restore([actor.logprobs(shard_of(batch))])["logprobs"]
    shifted = own.with_values(torch.where(batch["response_mask"].values, own.values - 0.25, 0.0))
    columns = batch.drop(["rollout_logprobs"]).union({"logprobs": shifted})
    (metrics,) = actor.train_step(shard_of(columns), PolicyGradientLoss(algorithm, temperature=1.0), 0.1)
    assert metrics["actor/logprob_gap"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["actor/ratio_mean"] == pytest.approx(math.exp(0.25), rel=1e-5)


def test_tokens_at_the_bound_of_the_divergence_are_counted_in_each_response():
    batch = tiny_rollouts(SIZES).keep(["response_mask"])
    mask = batch["response_mask"]
    own = torch.full(mask.values.shape, -6.0)
    reference = torch.full(mask.values.shape, -5.9)
    reference[mask.segment_ids == 2] = -1.0
    columns = {"input_ids": mask.with_values(torch.zeros(own.shape, dtype=torch.int64))}
    columns |= {"logprobs": mask.with_values(own), "reference_logprobs": mask.with_values(reference)}
    actor, shard = ActorWorker.__new__(ActorWorker), shard_of(batch.union(columns))  # needs no model
    bounded = batch.restore([actor.kl_sums(shard, "k3", 10.0)])
    ordinary = math.exp(0.1) - 1.1
    assert bounded["kl_bounded"].tolist() == [0, 0, 6]
    assert bounded["kl_sum"].tolist() == pytest.approx([9 * ordinary, ordinary, 60.0], rel=1e-4)
    assert "kl_bounded" not in actor.kl_sums(shard, "k3")
    assert "kl_bounded" not in actor.kl_sums(shard, "abs", 10.0)


def test_advantages_are_normalized_by_the_moments_that_the_loss_gets():
    actors = [actor_of(tiny_config(algorithm=ON_POLICY)) for _ in range(2)]
    batch = on_policy_batch(actors[0])
    mask, advantages = batch["response_mask"], batch["advantages"]
    normalized = advantages.with_values(torch.where(mask.values, (advantages.values - 0.25) / (2.0 + 1e-8), 0.0))
    (expected,) = actors[0].train_step(
        shard_of(batch.drop(["advantages"]).union({"advantages": normalized})), loss_of(on_policy=True), 0.1
    )
    moments = Moments(0.25, 2.0)
    (metrics,) = actors[1].train_step(shard_of(batch), loss_of(on_policy=True, advantage_moments=moments), 0.1)
    assert metrics == expected


def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have attention see all of a packed microbatch as one sequence."""
    of = attention.Segments.from_lengths
    monkeypatch.setattr(attention.Segments, "from_lengths", lambda lengths, *rest: of([sum(lengths)], *rest))


def checked(mode: str) -> Config:
    batching = {"packed": Batching(), "dynamic": Batching(mode="dynamic"), "fixed": Batching(mode="fixed")}[mode]
    return tiny_config(actor=Actor(isolation_check=True), batching=batching)


@pytest.mark.parametrize("mode", ["packed", "dynamic", "fixed"])
def test_an_actor_with_the_isolation_check_trains_as_one_without(mode: str):
    config = checked(mode)
    unchecked = config.model_copy(update={"actor": Actor(isolation_check=False)})
    (metrics, weights), (expected, others) = (policy_update(actor_of(each)) for each in (config, unchecked))
    assert metrics == expected
    assert metrics["actor/grad_norm"] > 0
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


@pytest.mark.parametrize("role", [ActorWorker, ReferenceWorker])
def test_a_model_that_leaks_when_packed_is_refused_where_it_is_packed_alone(role, monkeypatch: pytest.MonkeyPatch):
    leak(monkeypatch)
    with pytest.raises(IsolationError, match=r"batching\.mode=dynamic or fixed"):
        role.from_settings(RankContext(), checked("packed"), tiny_tokenizer())
    role.from_settings(RankContext(), checked("dynamic"), tiny_tokenizer())
    role.from_settings(RankContext(), checked("fixed"), tiny_tokenizer())


def test_supervised_losses_are_those_of_the_model_itself_at_any_sampling_temperature():
    losses = [
        actor_of(tiny_config(rollout=Rollout(temperature=temperature))).train_step(shard_of(lesson()), SFTLoss(), 0.1)[
            0
        ]["actor/loss"]
        for temperature in (1.0, 0.25)
    ]
    assert losses[0] == losses[1]


def test_the_supervised_loss_that_is_logged_is_the_mean_over_tokens_however_it_is_weighed():
    actors = [actor_of(tiny_config()) for _ in range(2)]
    summed = lesson()
    summed["loss_weight"] = 50 * summed["loss_weight"]
    (mean,), (sums,) = (
        actor.train_step(shard_of(b), SFTLoss(), 0.1) for actor, b in zip(actors, (lesson(), summed), strict=True)
    )
    assert sums["actor/loss"] == mean["actor/loss"]
    assert sums["actor/grad_norm"] == pytest.approx(50 * mean["actor/grad_norm"], rel=1e-4)


def test_a_supervised_learning_rate_is_that_of_its_step_alone():
    config = tiny_config(actor=Actor(optimizer=Optimizer(learning_rate=0.25), isolation_check=False))
    actor = actor_of(config)
    (metrics,) = actor.train_step(shard_of(lesson()), SFTLoss(), 0.1)
    assert metrics["actor/learning_rate"] == 0.1
    assert policy_update(actor)[0]["actor/learning_rate"] == 0.25


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_dropout_never_acts_so_the_first_ratio_is_one(checkpointing: Literal["none", "full", "selective"]):
    dropout = 0.5 if checkpointing == "none" else 0.0
    actor = actor_of(
        tiny_config(
            model=Model(config=MODEL | {"attention_dropout": dropout}),
            actor=Actor(isolation_check=False, gradient_checkpointing=checkpointing),
            algorithm=Algorithm(),
        )
    )
    metrics, _ = policy_update(actor)
    assert metrics["actor/ratio_max"] == 1.0


def test_sums_of_log_probs_leave_out_tokens_that_were_cut():
    rollouts = tiny_rollouts([(2, 4), (3, 9), (5, 0)])
    batch = rollouts.keep(["input_ids", "response_mask", "rollout_logprobs"])
    actor = actor_of(tiny_config())
    (shard,) = batch.shard_by_batch_size(1, sequence_packing={"max_tokens": 8, "overlong": "truncate"})
    plan = make_plan(batch["input_ids"].lengths.numpy(), Batching(max_tokens=8, overlong="truncate"), dp_size=1)
    found = batch.restore([actor.logprobs(shard)], plan=plan)
    own, sampled = (column.rows() for column in (found["logprobs"], batch["rollout_logprobs"]))
    assert found["response_tokens"].tolist() == [4, 5, 0]
    inside = [slice(2, 6), slice(3, 8), slice(5, 5)]
    sums = [own[row][cut].double().sum().item() for row, cut in enumerate(inside)]
    gaps = [(own[row][cut] - sampled[row][cut]).double().abs().sum().item() for row, cut in enumerate(inside)]
    assert found["logprob_sum"].tolist() == pytest.approx(sums)
    assert found["logprob_gap"].tolist() == pytest.approx(gaps)
    assert own[1][8:].eq(0).all()


def test_sums_of_entropies_are_those_of_the_models_own_logits():
    batch = tiny_rollouts(SIZES).keep(["input_ids", "response_mask"])
    actor = actor_of(tiny_config(rollout=Rollout(temperature=0.7)))
    found = batch.restore([actor.logprobs(shard_of(batch))])
    policy, expected = actor._scorer.policy, []
    for tokens, inside in zip(batch["input_ids"].rows(), batch["response_mask"].rows(), strict=True):
        ids = tokens[None]
        logits = policy.run(lambda ids=ids: policy.model(input_ids=ids, use_cache=False).logits)
        logprobs = (logits[0].double() / 0.7).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        expected.append(entropy[:-1][inside[1:]].sum().item())
    assert found["entropy_sum"].tolist() == pytest.approx(expected, rel=1e-5)
    assert "entropy_sum" not in actor.logprobs(shard_of(batch), temperature=1.0)


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral"])
def test_a_reference_loads_architectures_whose_published_weights_have_other_names(kind: str, tmp_path: Path):
    """Transformers renames them in exported folders: mixtral's experts are stacked in the model only."""
    settings = {name: value for name, value in MODEL.items() if kind == "mixtral" or name != "num_key_value_heads"}
    config = tiny_config(model=Model(config={**settings, "model_type": kind}))
    actor = actor_of(config)
    reference = ReferenceWorker.from_settings(RankContext(), config, tiny_tokenizer())
    policy_update(actor)
    actor.export_reference(str(tmp_path))
    reference.load_model(str(tmp_path))
    weights = reference._scorer.policy.model.state_dict()
    for name, weight in exported_weights(actor).items():
        assert torch.equal(torch.as_tensor(weights[name].full_tensor()), weight), name

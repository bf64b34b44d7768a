"""Publishing weights from a trained policy to engines, over ranks that are objects of this process."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import Bucket, pack_bucket, unpack_bucket
from rlpack.config.schema import Config, Model
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import RoleError
from rlpack.distributed.weights import WeightChannel
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.gloo import GLOO
from rlpack.packing import Batching
from rlpack.rollout.canary import canary_tokens
from rlpack.rollout.errors import CanaryError
from rlpack.rollout.types import SamplingParams
from rlpack.testing.local_ranks import LocalRanks
from rlpack.worker import broadcast
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import SFTLoss
from rlpack.workers.rollout import RolloutWorker
from tests.builders import MODEL, tiny_config, tiny_rollouts, tiny_tokenizer

CANARY = canary_tokens(len(tiny_tokenizer()))


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class LossyActor(ActorWorker):
    """Zeroes one weight before its bucket is sent."""

    @broadcast
    def export_bucket(self, index: int, dtype: torch.dtype, version: int) -> Bucket | None:
        bucket = super().export_bucket(index, dtype, version)
        assert bucket is not None
        weights = unpack_bucket(bucket) | {"model.norm.weight": torch.zeros(32)}
        return pack_bucket(weights, index=index, count=bucket.header.count, version=version)


def group_of(role: str, kind: type[Any], config: Config, size: int = 1) -> WorkerGroup[Any]:
    def build(context: RankContext) -> Any:
        return kind.from_settings(context, config, tiny_tokenizer())

    return WorkerGroup(role, LocalRanks([build] * size), Batching(max_tokens=64))


def lesson() -> BatchedDataDict:
    batch = tiny_rollouts([(3, 9), (5, 1), (2, 6)]).keep(["input_ids", "response_mask"])
    share = torch.full((batch.num_rows,), 1 / batch["response_mask"].values.sum())
    return batch.union({"loss_weight": share, "token_weight": share})


def test_each_publication_gives_all_engines_the_newest_weights_and_the_next_version():
    actor = group_of("actor", ActorWorker, tiny_config())
    engines = group_of("rollout", RolloutWorker, tiny_config(seed=8), size=2)
    prompts = tiny_rollouts([(3, 0), (5, 0)]).keep(["input_ids", "group_ids", "uid"])
    prompts = prompts.union({"seeds": torch.tensor([5, 6])})
    channel = WeightChannel(actor, engines)
    assert channel.version == 0
    for version in (1, 2):
        assert channel.publish(CANARY) < 1e-5
        rollouts = engines.run(RolloutWorker.generate, prompts, SamplingParams(max_new_tokens=4))
        mask = rollouts["response_mask"].values
        assert rollouts["policy_version"].values[mask].unique().tolist() == [version]
        scored = actor.run(ActorWorker.logprobs, rollouts)
        torch.testing.assert_close(scored["logprobs"].values, rollouts["rollout_logprobs"].values, rtol=0, atol=1e-5)
        actor.run(ActorWorker.train_step, lesson(), SFTLoss(), 0.05)


def test_a_bucket_is_stored_on_the_node_of_the_rank_that_exports_it():
    buckets = [[SimpleNamespace(num_bytes=size), SimpleNamespace(num_bytes=1)] for size in (10, 200, 3000, 40000)]
    ranks = SimpleNamespace(nodes=["one", "other", "other"])
    source: Any = SimpleNamespace(run=lambda *_: SimpleNamespace(buckets=buckets), ranks=ranks, num_ranks=3)
    target: Any = SimpleNamespace(run=lambda *_: None)
    assert WeightChannel(source, target).bytes_by_node == {"one": 40012, "other": 3202}


def test_weights_that_were_kept_are_published_again_though_the_actor_has_others():
    actor = group_of("actor", ActorWorker, tiny_config())
    engines = group_of("rollout", RolloutWorker, tiny_config(seed=8), size=2)
    prompts = tiny_rollouts([(3, 0), (5, 0)]).keep(["input_ids", "group_ids", "uid"])
    prompts = prompts.union({"seeds": torch.tensor([5, 6])})
    channel = WeightChannel(actor, engines)
    channel.keeps = True

    def sampled() -> tuple[list[int], list[float]]:
        rollouts = engines.run(RolloutWorker.generate, prompts, SamplingParams(max_new_tokens=4))
        return rollouts["policy_version"].values.tolist(), rollouts["rollout_logprobs"].values.tolist()

    before = []
    for version in (1, 2):
        channel.publish(CANARY)
        before.append(sampled())
        actor.run(ActorWorker.train_step, lesson(), SFTLoss(), 0.05)
        engines.run(RolloutWorker.require_weights)  # as of engines that were started again
        with pytest.raises(RoleError, match="has no usable weights"):
            sampled()
        assert channel.publish_again(CANARY) < 1e-5
        assert (channel.version, sampled()) == (version, before[-1])
    assert before[0] != before[1]


def test_a_weight_that_is_changed_before_it_is_sent_stops_the_run_and_publishes_nothing():
    actor, engine = group_of("actor", LossyActor, tiny_config()), group_of("rollout", RolloutWorker, tiny_config())
    channel = WeightChannel(actor, engine)
    message = r"role rollout, rank 0, in publish: CanaryError: log-probs of the canary at policy version 1 differ"
    with pytest.raises(RoleError, match=message) as raised:
        channel.publish(CANARY)
    assert isinstance(raised.value.original, CanaryError)
    assert raised.value.original.policy_version == 1
    assert channel.version == 0


def test_a_model_of_another_shape_is_refused_when_the_channel_is_opened():
    other = tiny_config(model=Model(config=MODEL | {"num_hidden_layers": 1}))
    actor, engine = group_of("actor", ActorWorker, tiny_config()), group_of("rollout", RolloutWorker, other)
    with pytest.raises(RoleError, match=r"in check_weights: EngineError: weights do not fit: missing \[\], unknown"):
        WeightChannel(actor, engine)

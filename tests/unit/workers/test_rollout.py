import logging
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import pack_bucket
from rlpack.batch.weight_layout import WeightLayout
from rlpack.config.schema import Actor, Data, Model, Placement, Pool, Rollout
from rlpack.distributed.context import RankContext
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import TOLERANCES, canary_tokens
from rlpack.rollout.errors import CanaryError, EngineError
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import SamplingParams
from rlpack.workers.build import build_model
from rlpack.workers.rollout import RolloutWorker
from tests.builders import MODEL, tiny_config, tiny_rollouts, tiny_tokenizer
from tests.unit.rollout.streaming import StreamingHF

PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=(1,))


CANARY = canary_tokens(len(tiny_tokenizer()))


def policy_of(seed: int = 3) -> Policy:
    return Policy(build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=seed))


def send(
    policy: Policy, worker: RolloutWorker, version: int, corrupt: str = "", change: Any = 0.0, agree: bool = True
) -> None:
    """Send a policy's weights in buckets that nothing may write to, as Ray maps them; change one before it is sent."""
    stream = WeightStream(policy, worker.weights_form().dtype, bucket_bytes=8000)
    if agree:
        worker.check_weights(stream.layout)
    for index, weights in enumerate(stream):
        if corrupt in weights:
            weights[corrupt] += change
        bucket = pack_bucket(weights, index=index, count=len(stream.layout), version=version)
        for array, _ in bucket.arrays.values():
            array.flags.writeable = False
        worker.load_bucket(bucket, version)


def own_logprobs(policy: Policy) -> np.ndarray:
    """Return the policy's log-probs of the canary, each row by the wrapped model alone."""
    with torch.no_grad():
        return torch.stack([policy.probe_wrapped_model(row[None])[0] for row in CANARY]).numpy()


@pytest.fixture(scope="module")
def worker() -> RolloutWorker:
    return RolloutWorker.from_settings(RankContext(), tiny_config(), tiny_tokenizer())


def prompts() -> BatchedDataDict:
    batch = tiny_rollouts([(3, 0), (5, 0), (1, 0), (5, 0)]).keep(["input_ids", "group_ids", "uid"])
    return batch.union({"seeds": torch.tensor([5, 6, 7, 6])})


def test_responses_follow_their_prompts_and_are_written_out(worker: RolloutWorker):
    given = prompts()
    made = worker.generate(given, PARAMS)
    tokenizer = tiny_tokenizer()
    assert made["uid"] == given["uid"]
    for row in range(made.num_rows):
        tokens, mask, prompt = made["input_ids"][row], made["response_mask"][row], given["input_ids"][row]
        assert torch.equal(tokens[~mask], prompt)
        assert 1 <= mask.sum() <= 6
        assert (made["finish_reason"][row] == "stop") == (tokens[-1].item() == tokenizer.eos_token_id)
        assert made["completion"][row] == tokenizer.decode(tokens[mask], skip_special_tokens=True)
        assert (made["rollout_logprobs"][row][mask] < 0).all()


def test_a_row_is_sampled_alike_in_any_company_and_keeps_its_id(worker: RolloutWorker):
    whole, part = worker.generate(prompts(), PARAMS), worker.generate(prompts().select([3, 1]), PARAMS)
    assert part.row_ids.tolist() == [3, 1]
    for place, row in enumerate((3, 1)):
        assert torch.equal(part["input_ids"][place], whole["input_ids"][row])


def test_no_prompts_give_no_rollouts(worker: RolloutWorker):
    assert worker.generate(prompts().select([]), PARAMS).num_rows == 0


def test_new_weights_are_used_and_their_version_is_on_every_row():
    worker = RolloutWorker.from_settings(RankContext(), tiny_config(), tiny_tokenizer())
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
    before = worker.generate(prompts(), greedy)
    other = RolloutWorker.from_settings(RankContext(), tiny_config(seed=4), tiny_tokenizer())
    expected = other.generate(prompts(), greedy)
    policy = policy_of(seed=4)
    send(policy, worker, 9)
    worker.publish(own_logprobs(policy), CANARY, 9)
    after = worker.generate(prompts(), greedy)
    assert not torch.equal(before["input_ids"].values, after["input_ids"].values)
    assert torch.equal(after["input_ids"].values, expected["input_ids"].values)
    mask = after["response_mask"].values
    assert after["policy_version"].values[mask].unique().tolist() == [9]
    assert after["policy_version"].values[~mask].unique().tolist() == [-1]


def test_an_engine_with_the_trainers_weights_passes_the_canary_by_a_wide_margin(worker: RolloutWorker):
    policy = policy_of()
    send(policy, worker, 1)
    assert worker.publish(own_logprobs(policy), CANARY, 1) < TOLERANCES[torch.float32].largest / 20


KINDS_OF_WEIGHTS = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.bias",
    "model.layers.0.self_attn.v_proj.bias",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", KINDS_OF_WEIGHTS)
def test_a_weight_of_any_kind_that_is_changed_before_it_is_sent_is_refused(worker: RolloutWorker, name: str):
    policy = policy_of()
    # The head's rows need different changes: a constant would move all logits alike.
    change = torch.linspace(-0.05, 0.05, policy.model.get_parameter(name).shape[0])
    send(policy, worker, 7, name, change[:, None] if policy.model.get_parameter(name).ndim == 2 else change)
    before = worker._engine.policy_version
    with pytest.raises(
        CanaryError,
        match=r"policy version 7 differ from the trainer's by up to .* \(tolerance 3\.\d+e-05\) and .*, most",
    ):
        worker.publish(own_logprobs(policy), CANARY, 7)
    assert worker._engine.policy_version == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_fails_the_canary(worker: RolloutWorker, value: float):
    policy = policy_of()
    send(policy, worker, 7, "model.norm.weight", value)
    with pytest.raises(CanaryError, match="by up to inf nats"):
        worker.publish(own_logprobs(policy), CANARY, 7)


class Recorder(HFEngine):
    """Notes the calls of an update."""

    calls: ClassVar[list[str]] = []

    def load_bucket(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.calls.append("load")
        super().load_bucket(weights)

    def finish_update(self) -> None:
        self.calls.append("finish")

    def logprobs(self, token_ids: torch.Tensor) -> torch.Tensor:
        self.calls.append("canary")
        return super().logprobs(token_ids)


def test_an_update_is_finished_once_after_all_buckets_and_before_the_canary():
    policy, calls = policy_of(), Recorder.calls
    config, tokenizer, device = tiny_config(), tiny_tokenizer(), torch.device("cpu")
    engine = Recorder.from_settings(config.model, config.rollout, tokenizer, device=device, seed=5, max_length=64)
    worker = RolloutWorker(RankContext(), engine, tokenizer, canary_tolerance=TOLERANCES[torch.float32])
    expected = own_logprobs(policy)
    send(policy, worker, 1)
    worker.publish(expected, CANARY, 1)
    assert calls == ["load"] * calls.count("load") + ["finish", "canary"]
    assert calls.count("load") >= 3
    calls.clear()
    with pytest.raises(EngineError, match="policy version 1 was to be published again"):
        worker.publish(expected, CANARY, 1)
    assert calls == []


class Full(HFEngine):
    """Has no room for a norm."""

    def load_bucket(self, weights: Mapping[str, torch.Tensor]) -> None:
        if "model.norm.weight" in weights:
            raise EngineError("no room")
        super().load_bucket(weights)


def test_a_bucket_that_the_engine_can_not_load_is_named_and_no_token_is_sampled():
    config, tokenizer, device = tiny_config(), tiny_tokenizer(), torch.device("cpu")
    engine = Full.from_settings(config.model, config.rollout, tokenizer, device=device, seed=5, max_length=64)
    worker = RolloutWorker(RankContext(), engine, tokenizer, canary_tolerance=TOLERANCES[torch.float32])
    with pytest.raises(EngineError, match=r"role rollout: bucket \d+ of \d+ of policy version 1 was not loaded: no"):
        send(policy_of(), worker, 1)
    for refused in (lambda: worker.generate(prompts(), PARAMS), lambda: worker.publish(np.zeros(()), CANARY, 1)):
        with pytest.raises(EngineError, match="was not loaded: no room"):
            refused()


class Mortal(StreamingHF):
    """Dies in one call of an update."""

    dies_in = ""

    def _live_through(self, call: str) -> None:
        if call == self.dies_in:
            self.is_alive = False
        if not self.is_alive:
            raise EngineError("the engine died")

    def load_bucket(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._live_through("the first bucket" if "model.embed_tokens.weight" in weights else "another bucket")
        super().load_bucket(weights)

    def finish_update(self) -> None:
        self._live_through("the end")

    def logprobs(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._live_through("the canary")
        return super().logprobs(token_ids)


@pytest.mark.parametrize("dies_in", ["the first bucket", "another bucket", "the end", "the canary"])
def test_an_engine_that_dies_while_weights_are_published_is_replaced_and_gets_them_again(dies_in: str):
    def engine() -> Mortal:
        return Mortal(build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=9, attention_name="sdpa"))

    first, policy, tolerance = engine(), policy_of(), TOLERANCES[torch.float32]
    worker = RolloutWorker(RankContext(), first, tiny_tokenizer(), canary_tolerance=tolerance, rebuild=engine)
    expected = own_logprobs(policy)
    send(policy, worker, 1)
    worker.publish(expected, CANARY, 1)
    first.dies_in = dies_in
    send(policy, worker, 2)
    with pytest.raises(EngineError, match=r"the engine died|has not arrived"):
        worker.publish(expected, CANARY, 2)  # a second failure in a row ends the run
    assert worker.publish(expected, CANARY, 2, True) == math.inf
    with pytest.raises(EngineError, match="no usable weights"):
        worker.generate(prompts(), PARAMS)
    worker.replace_failed_engine()
    send(policy, worker, 2)
    assert worker.publish(expected, CANARY, 2) < tolerance.largest
    made = worker.generate(prompts(), PARAMS)
    assert made["policy_version"].values[made["response_mask"].values].unique().tolist() == [2]


class Agreeing(StreamingHF):
    """Loads only weights that were agreed on, as an engine with runtime adapters does."""

    names: frozenset[str] = frozenset()

    def check_weights(self, layout: WeightLayout) -> None:
        super().check_weights(layout)
        self.names = frozenset(layout.shapes)

    def load_bucket(self, weights: Mapping[str, torch.Tensor]) -> None:
        assert self.names.issuperset(weights)
        super().load_bucket(weights)


def test_an_engine_that_is_replaced_before_a_publication_gets_weights_that_were_agreed_on_before():
    def engine() -> Agreeing:
        return Agreeing(
            build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=9, attention_name="sdpa")
        )

    first, policy, tolerance = engine(), policy_of(), TOLERANCES[torch.float32]
    worker = RolloutWorker(RankContext(), first, tiny_tokenizer(), canary_tolerance=tolerance, rebuild=engine)
    send(policy, worker, 1)
    worker.publish(own_logprobs(policy), CANARY, 1)
    first.is_alive = False  # it died during generation
    assert worker.replace_failed_engine()
    send(policy, worker, 2, agree=False)
    assert worker.publish(own_logprobs(policy), CANARY, 2) < tolerance.largest


class Corrupted(StreamingHF):
    """Changes a norm at the end of an update, as faulty memory would."""

    is_faulty = False

    def finish_update(self) -> None:
        super().finish_update()
        if self.is_faulty:
            with torch.no_grad():
                self._model.get_parameter("model.norm.weight").mul_(1.5)


def test_a_live_engine_that_fails_the_canary_is_replaced_once_if_it_can_be():
    def engine() -> Corrupted:
        return Corrupted(
            build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=9, attention_name="sdpa")
        )

    first, policy, tolerance = engine(), policy_of(), TOLERANCES[torch.float32]
    expected = own_logprobs(policy)
    worker = RolloutWorker(RankContext(), first, tiny_tokenizer(), canary_tolerance=tolerance, rebuild=engine)
    alone = RolloutWorker(RankContext(), first, tiny_tokenizer(), canary_tolerance=tolerance)
    first.is_faulty = True
    send(policy, worker, 1)
    with pytest.raises(CanaryError, match="policy version 1"):
        worker.publish(expected, CANARY, 1)  # a second failure in a row
    assert worker.publish(expected, CANARY, 1, True) == math.inf
    assert first.is_alive
    with pytest.raises(EngineError, match="no usable weights"):
        worker.generate(prompts(), PARAMS)
    worker.replace_failed_engine()
    assert worker._engine is not first
    send(policy, worker, 1)
    assert worker.publish(expected, CANARY, 1) < tolerance.largest
    made = worker.generate(prompts(), PARAMS)
    assert made["policy_version"].values[made["response_mask"].values].unique().tolist() == [1]
    send(policy, alone, 1)
    with pytest.raises(CanaryError, match="policy version 1"):
        alone.publish(expected, CANARY, 1, True)  # no engine can be started in its place


class Interruptible(Corrupted):
    """Notes when it is interrupted and resumed; it can die while it is resumed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[str] = []

    def interrupt(self) -> None:
        self.calls.append("interrupt")

    def resume(self) -> None:
        self.calls.append("resume")
        if self.is_faulty:
            self.is_alive = False
            raise EngineError("the engine died")


@pytest.fixture
def interruptible() -> RolloutWorker:
    def engine() -> Interruptible:
        return Interruptible(
            build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=9, attention_name="sdpa")
        )

    tolerance = TOLERANCES[torch.float32]
    return RolloutWorker(RankContext(), engine(), tiny_tokenizer(), canary_tolerance=tolerance, rebuild=engine)


def test_an_interrupted_engine_and_its_replacement_wait_until_they_are_resumed(interruptible: RolloutWorker):
    worker, policy = interruptible, policy_of()
    expected, first = own_logprobs(policy), cast(Interruptible, worker._engine)
    worker.resume()
    assert first.calls == []  # it was not interrupted
    worker.interrupt()
    first.is_faulty = True
    send(policy, worker, 1)
    assert worker.publish(expected, CANARY, 1, True) == math.inf
    worker.replace_failed_engine()
    second = cast(Interruptible, worker._engine)
    send(policy, worker, 1)
    worker.publish(expected, CANARY, 1)
    assert (first.calls, second.calls) == (["interrupt"], ["interrupt"])
    worker.resume()
    worker.resume()
    assert second.calls == ["interrupt", "resume"]


def test_an_engine_that_dies_when_it_is_resumed_is_replaced_later(
    interruptible: RolloutWorker, caplog: pytest.LogCaptureFixture
):
    worker, policy = interruptible, policy_of()
    engine = cast(Interruptible, worker._engine)
    send(policy, worker, 1)
    worker.interrupt()
    worker.publish(own_logprobs(policy), CANARY, 1)
    engine.is_faulty = True
    with caplog.at_level(logging.WARNING):
        worker.resume()
    assert "the engine died; the engine of rank 0 is replaced" in caplog.text
    assert worker.replace_failed_engine()
    assert worker._engine is not engine


def test_no_token_is_sampled_with_weights_that_are_unpublished_or_failed_the_canary():
    worker = RolloutWorker.from_settings(RankContext(), tiny_config(), tiny_tokenizer())
    send(policy_of(), worker, 1)
    with pytest.raises(EngineError, match=r"no usable weights: .* not published"):
        worker.generate(prompts(), PARAMS)
    with pytest.raises(CanaryError):
        worker.publish(own_logprobs(policy_of(seed=4)), CANARY, 1)
    with pytest.raises(EngineError, match="no usable weights"):
        worker.generate(prompts(), PARAMS)


def test_the_engine_is_told_the_longest_row_it_has_to_hold(monkeypatch: pytest.MonkeyPatch):
    given: list[int] = []

    def build(*sections: Any, max_length: int, **others: Any) -> Any:
        given.append(max_length)
        return HFEngine.from_settings(*sections, max_length=max_length, **others)

    monkeypatch.setattr("rlpack.workers.rollout.engine_class", lambda name: SimpleNamespace(from_settings=build))
    for prompt, response in ((40, 24), (3, 2)):
        config = tiny_config(data=Data(max_prompt_tokens=prompt), rollout=Rollout(max_new_tokens=response))
        RolloutWorker.from_settings(RankContext(), config, tiny_tokenizer())
    assert given == [64, CANARY.shape[1]]


@pytest.mark.parametrize(
    ("roles", "gpus", "options", "expected"),
    [
        ({}, 1, {}, (1, {"gpu_memory_utilization": 0.5})),
        ({}, 1, {"vllm": {"gpu_memory_utilization": 0.7}}, (1, {"gpu_memory_utilization": 0.7})),
        ({"rollout": "own"}, 1, {}, (0, {})),
        # vLLM requires that its share of a GPU is free even if the size of its cache is given.
        ({}, 1, {"kv_cache_gb": 2.0}, (1, {"gpu_memory_utilization": 0.01})),
        ({"rollout": "own"}, 1, {"kv_cache_gb": 2.0}, (0, {"gpu_memory_utilization": 0.01})),
        (
            *({}, 1, {"kv_cache_gb": 2.0, "vllm": {"gpu_memory_utilization": 0.7}}),
            (1, {"gpu_memory_utilization": 0.7}),
        ),
        ({}, 0, {"kv_cache_gb": 2.0}, (0, {})),
    ],
    ids=[
        *("shared GPUs", "a given share", "a separate pool", "a given cache", "a given cache in a separate pool"),
        *("a given cache and share", "a given cache on a CPU"),
    ],
)
def test_an_engine_on_shared_gpus_sleeps_and_takes_half_of_their_memory_or_a_given_cache(
    monkeypatch, roles, gpus, options, expected
):
    given: list[Rollout] = []

    def build(model: Model, settings: Rollout, *sections: Any, **others: Any) -> Any:
        given.append(settings)
        return SimpleNamespace(dtype=torch.float32)

    monkeypatch.setattr("rlpack.workers.rollout.engine_class", lambda name: SimpleNamespace(from_settings=build))
    pool = Pool(ranks=1, gpus_per_rank=gpus)
    placement = Placement(pools={"main": pool, "own": pool}, roles=roles)
    config = tiny_config(rollout=Rollout(engine="vllm", **options), placement=placement)
    RolloutWorker.from_settings(RankContext(), config, tiny_tokenizer())
    assert (given[0].sleep_level, given[0].vllm) == expected


def test_the_tolerance_follows_the_less_precise_of_the_two():
    config = tiny_config(actor=Actor(precision="bf16"))
    assert (
        RolloutWorker.from_settings(RankContext(), config, tiny_tokenizer())._canary_tolerance
        == TOLERANCES[torch.bfloat16]
    )


def test_weights_of_another_model_are_refused_before_any_is_copied(worker: RolloutWorker):
    other = tiny_config(model=Model(config=MODEL | {"hidden_size": 16})).model
    stream = WeightStream(Policy(build_model(other, tiny_tokenizer(), RankContext(), seed=1)), torch.float32)
    with pytest.raises(EngineError, match=r"wrong shape .*model\.norm\.weight"):
        worker.check_weights(stream.layout)

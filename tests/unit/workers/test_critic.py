"""A critic alone, in this process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from rlpack.batch.bucket import Bucket, pack_bucket, unpack_bucket
from rlpack.config.schema import Critic, Model
from rlpack.distributed.context import RankContext
from rlpack.models.errors import ModelError
from rlpack.models.loading import build_causal_lm, build_meta_model
from rlpack.models.policy import Policy
from rlpack.models.stored_weights import check_weight_files
from rlpack.models.value_head import FILE, WEIGHT, save_value_head
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.errors import EngineError
from rlpack.workers.build import build_critic, build_model
from rlpack.workers.critic import CriticWorker
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer
from tests.file_sizes import no_larger_than

pytestmark = pytest.mark.usefixtures("process_group")


def test_an_exported_critic_gives_the_same_values_by_transformers_alone(tmp_path: Path):
    critic = CriticWorker.from_settings(RankContext(), tiny_config(recipe="ppo"), tiny_tokenizer())
    weight, bias = (parameter.to_local() for parameter in critic._critic.head.parameters())
    with torch.no_grad():
        weight.copy_(torch.linspace(-1, 1, weight.numel())[None])
        bias.fill_(0.5)
    batch = tiny_rollouts([(3, 5)]).keep(["input_ids", "response_mask"])
    (shard,) = batch.shard_by_batch_size(1, sequence_packing={"max_tokens": 32})
    values = critic.values(shard)["values"].values
    critic.export_model(str(tmp_path / "critic"))

    model = AutoModel.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    head = load_file(tmp_path / "critic" / "value_head.safetensors")
    hidden = model(batch["input_ids"].values[None]).last_hidden_state[0]
    expected = (hidden @ head["head.weight"].T + head["head.bias"])[:, 0]
    assert values[3:].tolist() == pytest.approx(expected[2:-1].tolist(), abs=1e-5)
    assert values[3:].std() > 0.01


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_critic_continues_from_its_export_with_its_value_head(tmp_path: Path, is_tied: bool):
    own = tiny_config().model
    config = tiny_config(recipe="ppo", model=Model(config=own.config | {"tie_word_embeddings": is_tied}))
    critic = CriticWorker.from_settings(RankContext(), config, tiny_tokenizer())
    with torch.no_grad():
        for parameter in critic._critic.parameters():
            parameter.to_local().uniform_(-0.3, 0.3)
    (shard,) = tiny_rollouts([(3, 5)]).shard_by_batch_size(1, sequence_packing={"max_tokens": 32})
    values = critic.values(shard)["values"].values
    critic.export_model(folder := str(tmp_path))

    check_weight_files(build_meta_model(Model(path=folder)), folder, "critic.path")
    build_causal_lm(Model(path=folder), vocab_size=len(tiny_tokenizer()), key="critic.path")  # as a whole
    later = tiny_config(recipe="ppo", model=config.model, critic=Critic(path=folder))
    again = CriticWorker.from_settings(RankContext(), later, tiny_tokenizer())
    assert again.values(shard)["values"].values.tolist() == values.tolist()
    assert values.std() > 0.01
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights.pop("embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"critic\.path is .* lack \d weights of .*embed_tokens\.weight|lm_head\.weight"
    ):
        CriticWorker.from_settings(RankContext(), later, tiny_tokenizer())
    whole = weights | {"embed_tokens.weight": embedding}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = load_file(tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:9])
    with pytest.raises(ModelError, match=r"critic\.path is .*, whose value_head\.safetensors can't be read: "):
        CriticWorker.from_settings(RankContext(), later, tiny_tokenizer())
    save_file(head | {WEIGHT: head[WEIGHT][:, :-1].clone()}, tmp_path / FILE)
    with pytest.raises(ModelError, match=r"critic\.path is .* value_head\.safetensors has .* instead of head\.weight"):
        CriticWorker.from_settings(RankContext(), later, tiny_tokenizer())


@pytest.mark.parametrize("num_labels", [1, 2])
def test_a_critic_starts_from_a_reward_model_with_its_head_if_that_has_one_label(tmp_path: Path, num_labels: int):
    settings = build_meta_model(tiny_config().model, vocab_size=len(tiny_tokenizer())).config
    settings.num_labels, settings.pad_token_id = num_labels, 0
    classifier = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    classifier.save_pretrained(tmp_path)
    config = tiny_config(recipe="ppo", critic=Critic(path=str(tmp_path)))
    head = build_critic(config, tiny_tokenizer(), RankContext()).head
    expected = classifier.score.weight.tolist() if num_labels == 1 else torch.zeros(1, settings.hidden_size).tolist()
    assert head.weight.to_local().tolist() == expected
    assert head.bias.to_local().tolist() == [0.0]


def critic_and_buckets() -> tuple[CriticWorker, list[Bucket]]:
    """Return a new critic and the buckets of another model's weights for it."""
    critic = CriticWorker.from_settings(RankContext(), tiny_config(recipe="ppo"), tiny_tokenizer())
    policy = Policy(build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=9))
    stream = WeightStream(policy, critic.weights_form().dtype, bucket_bytes=8000)
    critic.check_weights(stream.layout)
    count = len(stream.layout)
    return critic, [pack_bucket(weights, index=at, count=count, version=1) for at, weights in enumerate(stream)]


def test_a_transfer_to_the_critic_ends_with_all_buckets():
    critic, buckets = critic_and_buckets()
    for bucket in buckets[:-1]:
        critic.load_bucket(bucket, 1)
    number = len(buckets)
    with pytest.raises(EngineError, match=rf"role critic: bucket {number} of {number} of policy version 1 has not"):
        critic.finish_transfer(1)
    critic, buckets = critic_and_buckets()
    for bucket in buckets:
        critic.load_bucket(bucket, 1)
    critic.finish_transfer(1)
    sent = {name: weight for bucket in buckets for name, weight in unpack_bucket(bucket).items()}
    for name, weight in critic._critic.model.named_parameters():
        assert weight.full_tensor().equal(sent[f"model.{name}"])


def test_the_critic_copies_nothing_of_a_damaged_bucket():
    critic, buckets = critic_and_buckets()
    before = {name: weight.full_tensor().clone() for name, weight in critic._critic.model.named_parameters()}
    array, _ = next(iter(buckets[0].arrays.values()))
    array.reshape(-1)[0] += 1
    with pytest.raises(
        EngineError, match=rf"role critic: bucket 1 of {len(buckets)} of policy version 1 was corrupted"
    ):
        critic.load_bucket(buckets[0], 1)
    assert all(weight.full_tensor().equal(before[name]) for name, weight in critic._critic.model.named_parameters())


def test_a_full_disk_while_a_head_is_written_is_an_error_of_its_file(tmp_path: Path):
    with no_larger_than(100), pytest.raises(OSError, match=rf"{FILE} can't be written: .*File too large"):
        save_value_head({"weight": torch.zeros(1, 512)}, tmp_path)

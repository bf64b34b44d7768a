"""A critic alone, in this process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from rlpack.distributed.context import RankContext
from rlpack.workers.critic import CriticWorker
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer

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

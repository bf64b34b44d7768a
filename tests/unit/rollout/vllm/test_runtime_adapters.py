"""Adapters for vLLM: only matrices that fit the model are taken, and peft reads what is written."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpack.batch.weight_layout import TensorSpec, WeightLayout
from rlpack.config.sections.optimization import Lora
from rlpack.models.adapters import add_adapters
from rlpack.models.errors import ModelError
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.adapter_files import check_adapter, write_adapter
from rlpack.rollout.vllm.argument_names import OWN_ARGUMENTS
from rlpack.rollout.vllm.runtime_adapters import RuntimeAdapters, adapter_arguments

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}
TOKENS = torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(0))


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()


@pytest.fixture
def policy() -> Policy:
    """Return a policy with trained adapters of rank 3 and scale 2."""
    built = model()
    add_adapters(built, Lora(rank=3, alpha=6.0), seed=1)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if "lora_" in name:
                weight.add_(torch.randn_like(weight))
    return Policy(built)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's own
def test_peft_reads_what_is_written_as_the_same_model(policy: Policy):
    from peft import PeftModel

    stream = WeightStream(policy, torch.float32, adapters_only=True, bucket_bytes=2000)
    adapters = RuntimeAdapters(model())
    adapters.open(stream.layout)
    for bucket in stream:
        adapters.add(bucket)
    with adapters._written() as (folder, digest), torch.no_grad():
        check_adapter(Path(folder), digest)
        read: Any = PeftModel.from_pretrained(model(), folder)
        found, expected = read(TOKENS).logits, policy.model(TOKENS).logits
        plain = model()(TOKENS).logits
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not Path(folder).exists()


def test_no_argument_for_adapters_is_left_to_the_user_to_be_replaced_in_silence():
    assert adapter_arguments(model(), rank=8).keys() <= OWN_ARGUMENTS.keys()


def test_the_output_layer_gets_no_room_for_an_adapter():
    arguments = adapter_arguments(model(), rank=17)
    assert arguments["lora_target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj"),
        *("q_proj", "up_proj", "v_proj"),
    ]
    assert arguments["max_lora_rank"] == 32


def layout(*specs: tuple[str, tuple[int, ...]]) -> WeightLayout:
    return WeightLayout((tuple(TensorSpec(name, shape, torch.float32) for name, shape in specs),))


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("specs", "wrong"),
    [
        ([], "there are none"),
        ([(f"{LAYER}.lora_A.weight", (3, 16))], "q_proj.lora_B.weight"),
        ([(f"{LAYER}.lora_A.weight", (3, 17)), (f"{LAYER}.lora_B.weight", (16, 3))], "q_proj.lora_A.weight"),
        ([(f"{LAYER}.lora_A.weight", (3, 16)), (f"{LAYER}.lora_B.weight", (16, 4))], "q_proj.lora_B.weight"),
        ([("base_model.model.lm_head.lora_A.weight", (3, 16))], "lm_head.lora_A.weight"),
        ([("model.layers.0.self_attn.q_proj.weight", (16, 16))], "there are none|q_proj.weight"),
    ],
)
def test_matrices_that_fit_no_layer_are_named(specs: list[tuple[str, tuple[int, ...]]], wrong: str):
    with pytest.raises(EngineError, match=f"adapters do not fit the model's linear layers: .*({wrong})"):
        RuntimeAdapters(model()).open(layout(*specs))


def test_an_update_lacks_nothing(policy: Policy):
    stream = WeightStream(policy, torch.float32, adapters_only=True, bucket_bytes=2000)
    adapters = RuntimeAdapters(model())
    adapters.open(stream.layout)
    adapters.add(stream.gather(0))
    with pytest.raises(EngineError, match="of 28 matrices of adapters arrived before the update was to end"):
        asyncio.run(adapters.load(None))


def test_a_model_without_adapters_has_nothing_to_send():
    with pytest.raises(ModelError, match=r"no adapters to send; set actor\.lora\.rank, or rollout\.lora=merged"):
        WeightStream(Policy(model()), adapters_only=True)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("fault", ["cut", "bit flip", "missing", "older"])
def test_files_that_are_not_as_they_were_made_are_refused(tmp_path: Path, name: str, fault: str):
    folders = [tmp_path / "older", tmp_path / "newer"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        digest = write_adapter(folder, {"r": 3 + number}, {f"a{number}": torch.full((3, 5), float(number))})
    check_adapter(folders[1], digest)
    path = folders[1] / name
    data = path.read_bytes()
    if fault == "missing":
        path.unlink()
    else:
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        path.write_bytes({"cut": data[:-1], "bit flip": flipped, "older": (folders[0] / name).read_bytes()}[fault])
    with pytest.raises(EngineError, match=r"can't be read from .*No such file|was corrupted in transit: its digest is"):
        check_adapter(folders[1], digest)

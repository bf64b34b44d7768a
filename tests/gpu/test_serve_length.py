"""`rlpack serve` on CUDA: without --max-length, vLLM fits the length to the memory that the GPU has."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpack.rollout.vllm.vllm_package import installation_problem
from tests.vllm.engines import TOKENIZER, VOCABULARY
from tests.vllm.servers import START_S, printed_until, start

PROBLEM = installation_problem(on_gpu=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or ""),
]

LIMIT = 2**22  # tokens, whose keys and values in bf16 have 69 GB


def test_a_model_whose_longest_text_does_not_fit_is_served_with_a_shorter_one(tmp_path: Path):
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 32, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=LIMIT, num_key_value_heads=4, **sizes)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    options = ("vllm.gpu_memory_utilization=0.2", "vllm.max_num_seqs=4", "vllm.enforce_eager=true")
    process = start(tmp_path, "--start-timeout", str(START_S), *options)
    try:
        printed = printed_until(process, "Ctrl-C ends the server")
    finally:
        process.terminate()
        process.wait(timeout=20.0)
    length = re.search(r"prompt and response have up to (\d+) tokens together", printed)
    assert length is not None
    assert 32 <= int(length[1]) < LIMIT

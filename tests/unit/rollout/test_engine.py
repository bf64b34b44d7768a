from typing import Any, get_args

import torch

from rlpack.config.schema import Model, Rollout
from rlpack.rollout.engine import ENGINES, engine_class
from tests.builders import MODEL, tiny_tokenizer


def test_every_engine_of_the_schema_is_registered_and_builds_itself_from_its_sections():
    assert set(get_args(Rollout.model_fields["engine"].annotation)) == set(ENGINES)
    tokenizer = tiny_tokenizer()
    for name in set(ENGINES) - {"vllm"}:  # that one is in tests/vllm
        sections = Model(config=MODEL), Rollout(), tokenizer
        given: dict[str, Any] = {"device": torch.device("cpu"), "max_length": 64}
        engines = [engine_class(name).from_settings(*sections, **given, seed=seed) for seed in (1, 1, 2)]
        assert [(engine.vocab_size, engine.policy_version) for engine in engines] == [(len(tokenizer), 0)] * 3
        tokens = torch.arange(8).view(2, 4)
        first, same, other = (engine.logprobs(tokens) for engine in engines)
        assert first.equal(same)
        assert not first.equal(other)

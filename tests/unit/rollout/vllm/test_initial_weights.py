"""Where vLLM finds the weights that it starts with."""

from pathlib import Path

import pytest

from rlpack.config.schema import Model
from rlpack.rollout.vllm.initial_weights import initial_weights
from tests.builders import tiny_tokenizer


@pytest.mark.parametrize(("path", "expected"), [("~/m", "{home}/m"), ("owner/name", "owner/name")])
def test_a_folder_in_the_home_directory_is_given_to_vllm_by_its_full_path(
    path: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "m").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    with initial_weights(Model(path=path), tiny_tokenizer(), seed=1) as source:
        assert source == expected.format(home=tmp_path)

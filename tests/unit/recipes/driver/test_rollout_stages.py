"""Which prompts a step draws, and in which parts responses are generated."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Model, Rollout, Trainer
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, draw_prompts, sample_responses
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import session_of, set_group


def test_a_resumed_run_draws_the_next_prompts_even_if_it_draws_another_number_per_step(tmp_path: Path):
    whole, parts = (session_of(tmp_path, trainer=Trainer(prompts_per_step=count)) for count in (6, 2))
    expected = draw_prompts(whole, whole.begin_step(1))
    step = parts.begin_step(1)
    draws = [draw_prompts(parts, step)]
    resumed = session_of(tmp_path, trainer=Trainer(prompts_per_step=4))
    resumed.progress = Progress(phase="train", step=1, prompts_consumed=step.progress.prompts_consumed)
    step = resumed.begin_step(2)
    draws.append(draw_prompts(resumed, step))
    assert [uid for draw in draws for uid in draw.prompts["uid"]] == expected.prompts["uid"]
    assert np.concatenate([draw.positions for draw in draws]).tolist() == expected.positions.tolist()
    assert step.metrics["prompts_consumed"] == 6


@settings(deadline=None)
@given(prompts=st.integers(1, 40), samples=st.integers(1, 9), max_num_seqs=st.integers(1, 50), ranks=st.integers(1, 4))
def test_responses_come_in_parts_of_whole_groups_that_the_engines_run_at_a_time(
    tmp_path_factory: pytest.TempPathFactory, prompts: int, samples: int, max_num_seqs: int, ranks: int
):
    session = session_of(tmp_path_factory.getbasetemp(), rollout=Rollout(max_num_seqs=max_num_seqs))
    sizes: list[int] = []
    parts: list[BatchedDataDict] = []

    def generate(batch: BatchedDataDict, params: Any) -> BatchedDataDict:
        assert not sizes or len(sizes) == len(parts), "a part is passed on before the next is generated"
        sizes.append(batch.num_rows)
        return batch.keep(["group_ids"]).union({"seen": batch["seeds"]})

    set_group(session, "rollout", generate=generate).dp_size = ranks
    rows = BatchedDataDict({"input_ids": tiny_rollouts([(1, 0)] * prompts)["input_ids"], "uid": ["a"] * prompts})
    draw = DrawnPrompts(rows, 1, np.arange(prompts))
    in_parts = sample_responses(session, draw, samples, temperature=1.0, metrics={}, on_part=parts.append)
    assert [part.num_rows for part in parts] == sizes
    assert all(size % samples == 0 for size in sizes)
    assert max(sizes) <= max(samples, ranks * max_num_seqs)
    assert max(sizes) - min(sizes) <= samples
    sizes.clear()
    whole = sample_responses(session, draw, samples, temperature=1.0, metrics={})
    assert sizes == [prompts * samples]
    assert torch.equal(in_parts["seen"], whole["seen"])
    assert in_parts["group_ids"].tolist() == whole["group_ids"].tolist()


def test_responses_end_where_the_base_model_ends_a_turn(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}', encoding="utf-8")
    session = session_of(tmp_path, rollout=Rollout(stop_token_ids=(5,)))
    session.config = session.config.model_copy(update={"model": Model(path=str(tmp_path))})
    stops: list[tuple[int, ...]] = []

    def generate(batch: BatchedDataDict, params: Any) -> BatchedDataDict:
        stops.append(params.stop_token_ids)
        return batch.keep(["group_ids"])

    set_group(session, "rollout", generate=generate)
    rows = BatchedDataDict({"input_ids": tiny_rollouts([(1, 0)])["input_ids"], "uid": ["a"]})
    sample_responses(session, DrawnPrompts(rows, 1, np.arange(1)), 1, temperature=1.0, metrics={})
    assert stops == [(5, 1, 7)]


def test_engines_that_generate_whole_batches_are_idle_between_their_calls(tmp_path: Path):
    session = session_of(tmp_path)

    def generate(batch: BatchedDataDict, params: Any) -> BatchedDataDict:
        assert session.engine_access.load.in_flight == {0: 1, 1: 1}
        time.sleep(0.3)
        return batch.keep(["group_ids"])

    set_group(session, "rollout", generate=generate).dp_size = 2
    rows = BatchedDataDict({"input_ids": tiny_rollouts([(1, 0)])["input_ids"], "uid": ["a"]})
    for waited_s, least, most in ((0.0, 0.0, 0.3), (0.9, 0.6, 0.8)):
        session.begin_step(1)
        sample_responses(session, DrawnPrompts(rows, 1, np.arange(1)), 1, temperature=1.0, metrics={})
        time.sleep(waited_s)
        share = session.engine_access.load.pop_idle_share()
        assert share is not None
        assert least <= share <= most
    assert session.engine_access.load.in_flight == {0: 0, 1: 0}

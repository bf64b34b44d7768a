"""The session of `rlpack evaluate`: two roles and the held-out prompts, and the rows of one part."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlpack.batch.store import Store
from rlpack.config.recipes import recipe_section
from rlpack.config.schema import Config
from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.observe.evaluation.evaluation_dir import EngineFailures
from rlpack.observe.evaluation.sample_rows import SampleRow
from rlpack.recipes.driver.displayed_texts import displayed_texts
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.engine_restarts import replace_failed_engines
from rlpack.recipes.driver.evaluation import draw_held_out, sample_and_score
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, sample_seeds
from rlpack.recipes.driver.splits import Split
from rlpack.rewards.voted_answers import AnswerReader
from rlpack.workers.rollout import RolloutWorker


@dataclass
class EvaluationSession:
    """The started roles and the prompts of an evaluation.

    Attributes:
        config: the whole configuration.
        tokenizer: the model's tokenizer.
        held_out: the prompts.
        groups: the roles `rollout` and `reward`.
        store: holds the tokens and texts of a part.
        engine_access: the turns of generations, of which one runs at a time.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    held_out: Split
    groups: dict[str, WorkerGroup[Any]]
    store: Store
    engine_access: EngineAccess = field(default_factory=partial(EngineAccess, are_concurrent=False))
    _metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollout(self) -> WorkerGroup[RolloutWorker]:
        """Return the generating ranks."""
        return self.groups["rollout"]

    def renew_engines(self, generation: int, none_is_left: bool) -> bool:
        """Start a new engine for each that failed, which loads the model's weights."""
        replace_failed_engines(self.rollout, self.engine_access)
        self.engine_access.record_replacement(self.rollout.ranks.num_starts)
        return True

    def pop_engine_failures(self) -> EngineFailures:
        """Return how many rows were generated again, and engines replaced, since the last call."""
        metrics = self._metrics | self.engine_access.pop_metrics()
        self._metrics.clear()
        return EngineFailures(
            repeated_rows=int(metrics.get("rollout/repeated_rows", 0)),
            engines_replaced=int(metrics.get("rollout/engines_replaced", 0)),
        )

    def rows_of_part(self, positions: np.ndarray, reader: AnswerReader) -> list[SampleRow]:
        """Sample, score, and return the rows of these prompts, prompt by prompt.

        Args:
            positions: positions of the prompts in the dataset, int64.
            reader: reads the answers that majority votes count.
        """
        settings = recipe_section(self.config, Evaluate)
        with self.store.lease("a part of an evaluation"):
            drawn = draw_held_out(self, positions)
            sampled = list(self._rows(drawn, settings.samples, self.config.rollout.temperature, reader))
            greedy = list(self._rows(drawn, 1, 0.0, reader)) if settings.greedy else []
        by_prompt = [sampled[start : start + settings.samples] for start in range(0, len(sampled), settings.samples)]
        return [row for place, rows in enumerate(by_prompt) for row in (*rows, *greedy[place : place + 1])]

    def _rows(self, drawn: DrawnPrompts, samples: int, temperature: float, reader: AnswerReader) -> Iterator[SampleRow]:
        """Yield the rows of `samples` responses per prompt; at temperature 0, of the greedy one."""
        rollouts, (rewards, valid, _, _) = sample_and_score(self, drawn, samples, temperature, self._metrics)
        texts = displayed_texts(self.tokenizer, self.store, rollouts)
        seeds = sample_seeds(self.config.seed, drawn, samples).tolist()
        response_tokens = rollouts["response_lengths"]
        prompt_tokens = (rollouts["input_ids"].lengths - response_tokens).tolist()
        for row in range(rollouts.num_rows):
            prompt, response, answer = texts[row]
            is_valid, is_greedy = bool(valid[row]), temperature == 0
            yield SampleRow(
                prompt_index=int(drawn.positions[row // samples]),
                uid=rollouts["uid"][row],
                sample=None if is_greedy else row % samples,
                seed=None if is_greedy else seeds[row],
                prompt=prompt,
                response=response,
                answer=answer,
                extracted_answer=reader.read(response) if is_valid and reader.is_extracted else None,
                reward=rewards[row].item() if is_valid else None,
                finish_reason=rollouts["finish_reason"][row],
                prompt_tokens=prompt_tokens[row],
                response_tokens=int(response_tokens[row]),
            )

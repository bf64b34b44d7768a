"""A streaming engine for tests: an `hf` engine that answers a few rows at a time, and fails where it is told to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import Generations, SamplingParams


class StreamingHF(HFEngine):
    """Answers rows in a random order, `at_once` at a time; each row is generated alone, so its bits are its own.

    Attributes:
        fails: how many of the next answers are failures; an engine that failed is dead.
        late: how many of the next rows miss their deadline; their engine goes on with the others.
        spoils: how many of the next answers have log-probs that are NaN.
        most: the most rows that were in flight together.
        lengths: of the prompts, in the order in which they were begun.
    """

    at_once = 3
    fails = 0
    late = 0
    spoils = 0
    most = 0
    lengths: tuple[int, ...] | list[int] = ()

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        rows = range(prompts.num_rows)
        made = [super(StreamingHF, self).generate(prompts.select([row]), params, seeds[row : row + 1]) for row in rows]
        return self.to_generations([(one, 0) for one in made], params)

    def begin(self, keys: Sequence[int], prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> None:
        rows = vars(self).setdefault("rows", {})
        generations = self.generate(prompts, params, seeds)
        rows |= {key: (generations, place) for place, key in enumerate(keys)}
        self.most = max(self.most, len(rows))
        self.lengths = [*self.lengths, *prompts.lengths.tolist()]

    def finished(self, timeout_s: float) -> list[FinishedRow]:
        rows: dict[int, Any] = vars(self).setdefault("rows", {})
        if not self.is_alive:
            rows, failed = {}, rows
            self.rows = rows
            return [FinishedRow(key, None, "the engine is dead") for key in failed]
        keys = np.random.default_rng(len(rows)).permutation(list(rows))[: self.at_once].tolist()
        answers = []
        for key in keys:
            if self.late:
                self.late -= 1
                rows.pop(key)
                answers.append(FinishedRow(key, None, "no response within rollout.request_timeout_s=600 s"))
                continue
            if self.fails:
                self.is_alive = False
                answers.append(FinishedRow(key, None, "the engine died"))
                rows.pop(key)
                break
            generations, place = rows.pop(key)
            if self.spoils:
                self.spoils -= 1
                logprobs = generations.logprobs
                generations = replace(generations, logprobs=logprobs.with_values(logprobs.values * torch.nan))
            answers.append(FinishedRow(key, (generations, place), ""))
        return answers

    def to_generations(self, responses: Sequence[Any], params: SamplingParams) -> Generations:
        tokens, logprobs, versions = [], [], []
        for generations, place in responses:
            row = torch.tensor([place])
            tokens.append(generations.token_ids.select(row))
            logprobs.append(generations.logprobs.select(row))
            versions.append(generations.policy_versions.select(row))
        if not responses:
            empty = Ragged.from_rows([], torch.int64)
            return Generations(empty, empty.with_values(torch.zeros(0)), empty.with_values(torch.zeros(0).int()), [])
        reasons = [generations.finish_reasons[place] for generations, place in responses]
        return Generations(Ragged.concat(tokens), Ragged.concat(logprobs), Ragged.concat(versions), reasons)

    def abort(self, keys: Sequence[int] | None = None) -> None:
        rows: dict[int, Any] = vars(self).setdefault("rows", {})
        self.rows = {} if keys is None else {key: row for key, row in rows.items() if key not in keys}

    def interrupt(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> bool:
        return True

    is_alive = True

    def close(self) -> None:
        self.is_alive = False

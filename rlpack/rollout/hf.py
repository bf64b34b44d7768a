"""The `hf` engine: batched sampling over a transformers model, on any device.

Prompts are sorted by length and run in batches, with a key-value cache where the model has one that is exact:
`rlpack.rollout.decoding` chooses. Finished rows leave the batch at once. Weights are fp32, whatever type the policy is
trained in.
"""

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.batch.ragged import Ragged
from rlpack.batch.weight_layout import WeightLayout
from rlpack.config.schema import Model, Placement, Rollout
from rlpack.data.tokenization import eos_id, pad_id
from rlpack.models.loading import build_causal_lm
from rlpack.rollout.decoders import Decoder
from rlpack.rollout.decoding import choose_decoder
from rlpack.rollout.engine_meter import NAME
from rlpack.rollout.errors import EngineError, SamplingError
from rlpack.rollout.layout_check import check_layout
from rlpack.rollout.sampling import sample, uniforms
from rlpack.rollout.types import Generations, SamplingParams
from rlpack.rollout.whole_rows import WholeRowComparison
from rlpack.spans import record_values


class HFEngine:
    """Generates with its own transformers model; implements `rlpack.rollout.engine.Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token_id: int = 0,
        max_num_seqs: int = 256,
        max_length: int | None = None,
    ) -> None:
        """Wrap `model`, which nothing else may train or reconfigure.

        Args:
            model: a decoder whose attention supports a cache (`sdpa`, `eager`), on its device.
            pad_token_id: any id of the vocabulary; it is always masked.
            max_num_seqs: rows that run at the same time.
            max_length: maximum tokens of a row; None if not known.

        Raises:
            EngineError: the model's attention does not support a cache, or the model can't generate.
        """
        attention = model.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise EngineError(f"the model's attention is {attention!r}; generation needs sdpa or eager")
        self.policy_version = 0
        self.dtype = model.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._model = model.eval()
        self._pad_token_id = pad_token_id
        self._max_num_seqs = max_num_seqs
        self._decoder = choose_decoder(self._model, pad_token_id, max_length=max_length)
        self._comparison = WholeRowComparison(self._model)

    @classmethod
    def from_settings(
        cls,
        model: Model,
        settings: Rollout,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        seed: int,
        max_length: int,
        placement: Placement | None = None,
    ) -> Self:
        """Build the model of the `model` section on the rank's device, with an attention that supports a cache.

        Raises:
            ModelError: the section describes no language model, or the tokenizer has more tokens than the model.
        """
        built = build_causal_lm(
            model,
            vocab_size=len(tokenizer),
            eos_token_id=eos_id(tokenizer),
            pad_token_id=pad_id(tokenizer),
            seed=seed,
            device=device,
            attention_name="sdpa",
        )
        return cls(built, pad_token_id=pad_id(tokenizer), max_num_seqs=settings.max_num_seqs, max_length=max_length)

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        """Return one response for each prompt, as documented at `Engine.generate`.

        Raises:
            SamplingError: a prompt is empty, or there is not one seed per row.
            EngineError: the model returned logits that are not finite.
        """
        if len(seeds) != prompts.num_rows:
            raise SamplingError(f"there are {len(seeds)} seeds for {prompts.num_rows} prompts; give one each")
        if prompts.num_rows and int(prompts.lengths.min()) == 0:
            raise SamplingError(f"prompt {int(prompts.lengths.argmin())} is empty; it needs at least one token")
        order = torch.argsort(prompts.lengths, stable=True)
        tokens, logprobs, is_stopped = [], [], np.zeros(prompts.num_rows, dtype=bool)
        for rows in self._batches(order, prompts.lengths[order]):
            began = time.time()
            decoder = self._decoder(self._model, prompts.select(rows), params.max_new_tokens, self._pad_token_id)
            responses = _respond(decoder, params, seeds[rows.numpy(force=True)], self._model.device)
            self._check_last_logits(prompts.select(rows), responses)
            lengths = torch.from_numpy(responses.lengths)
            tokens.append(Ragged.from_padded(torch.from_numpy(responses.tokens), lengths))
            logprobs.append(Ragged.from_padded(torch.from_numpy(responses.logprobs), lengths))
            is_stopped[rows.numpy(force=True)] = responses.stopped
            _record_batch(began, responses.lengths)
        inverse = torch.argsort(order)
        token_ids = _concat(tokens, torch.int64).select(inverse)
        versions = torch.full(token_ids.values.shape, self.policy_version, dtype=torch.int32)
        return Generations(
            token_ids=token_ids,
            logprobs=_concat(logprobs, torch.float32).select(inverse),
            policy_versions=token_ids.with_values(versions),
            finish_reasons=["stop" if stopped else "length" for stopped in is_stopped],
        )

    def _check_last_logits(self, prompts: Ragged, responses: "_Responses") -> None:
        """Compare the last logits of a batch with those of whole rows, if a comparison is due."""
        last = responses.last
        lengths = prompts.lengths.numpy(force=True)[last.rows] + last.position
        longest = self._comparison.due(lengths, self.policy_version)
        rows = [
            torch.cat([prompts[int(row)].cpu(), torch.from_numpy(responses.tokens[row, : last.position])])
            for row in last.rows[longest]
        ]
        self._comparison.compare(rows, last.logits[torch.from_numpy(longest).to(last.logits.device)])

    @property
    def decoder_name(self) -> str:
        """Return the name of the decoder that is exact for the model."""
        return self._decoder.__name__

    def _batches(self, order: Tensor, lengths: Tensor) -> Iterator[Tensor]:
        """Yield the rows that run together.

        Args:
            order: rows by length, int64 [B].
            lengths: lengths of their prompts, int64 [B].
        """
        if order.numel() == 0:
            return
        groups = [order]
        if self._decoder.equal_lengths:
            groups = order.split(torch.unique_consecutive(lengths, return_counts=True)[1].tolist())
        for group in groups:
            yield from group.split(self._max_num_seqs)

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Return log p(token | tokens before it), f32 [R, L] on the CPU, as documented at `Engine.logprobs`."""
        token_ids = token_ids.to(self._model.device)
        logits = self._model(input_ids=token_ids, use_cache=False).logits[:, :-1]
        scores = logits.float().log_softmax(-1).gather(2, token_ids[:, 1:, None]).squeeze(2)
        return torch.nn.functional.pad(scores, (1, 0)).cpu()

    def check_weights(self, layout: WeightLayout) -> None:
        """Check names and shapes; weights tied to one that is sent may be missing.

        Raises:
            EngineError: a name or a shape does not fit the model.
        """
        check_layout(self._model, layout)

    @torch.no_grad()
    def load_bucket(self, weights: Mapping[str, Tensor]) -> None:
        """Copy one bucket of weights into the model."""
        own = self._model.state_dict()
        for name, weight in weights.items():
            own[name].copy_(weight)

    def finish_update(self) -> None:
        """Do nothing: `load_bucket` has copied every bucket into the model."""


def _record_batch(began: float, lengths: np.ndarray) -> None:
    """Record the tokens of a batch, and the mean number of rows that ran at a time.

    Args:
        began: seconds since the epoch.
        lengths: tokens of each response, int64 [B].
    """
    tokens, steps = int(lengths.sum()), int(lengths.max(initial=0))
    values = {"running": round(tokens / max(1, steps), 2), "tokens": tokens}
    record_values(NAME, int(began * 1e6), int(time.time() * 1e6), values)


class _Last(NamedTuple):
    """The last forward pass of a batch of rows."""

    rows: np.ndarray  # int64 [R], those that were running
    position: int  # tokens of their responses before it
    logits: Tensor  # [R, V]


class _Responses(NamedTuple):
    """Responses of a batch of rows, on the CPU; entries after a row's length are undefined."""

    tokens: np.ndarray  # int64 [B, limit]
    logprobs: np.ndarray  # f32 [B, limit]
    lengths: np.ndarray  # int64 [B]
    stopped: np.ndarray  # bool [B]
    last: _Last


@torch.inference_mode()
def _respond(decoder: Decoder, params: SamplingParams, seeds: np.ndarray, device: torch.device) -> _Responses:
    """Generate until every row has stopped or is at the limit.

    The CPU keeps track of the rows; from the device it needs only each step's tokens.
    """
    limit = params.max_new_tokens
    tokens, logprobs = np.zeros((len(seeds), limit), dtype=np.int64), np.zeros((len(seeds), limit), dtype=np.float32)
    lengths, stopped = np.full(len(seeds), limit), np.zeros(len(seeds), dtype=bool)
    logits = decoder.prefill()
    is_stop = np.zeros(logits.shape[-1], dtype=bool)
    is_stop[[token for token in params.stop_token_ids if token < len(is_stop)]] = True
    running = np.arange(len(seeds))
    last = _Last(running, 0, logits)
    steps: list[tuple[np.ndarray, Tensor]] = []  # the rows of each step, and their log-probs
    for position in range(limit):
        sampled, scores = sample(logits, params, uniforms(seeds[running], position))
        steps.append((running, scores))
        last = _Last(running, position, logits)
        chosen = sampled.numpy(force=True)
        tokens[running, position] = chosen
        ending = is_stop[chosen]
        if ending.any():
            lengths[running[ending]], stopped[running[ending]] = position + 1, True
            if ending.all():
                break
            kept = torch.from_numpy(_filled(~ending))
            decoder.keep(kept.to(device))
            running, sampled = running[kept.numpy()], sampled[kept.to(device)]
        if position + 1 < limit:
            logits = decoder.step(sampled)
    # One transfer for all steps.
    every = torch.cat([scores for _, scores in steps]).numpy(force=True)
    ends = np.cumsum([len(rows) for rows, _ in steps])
    for position, (rows, _) in enumerate(steps):
        logprobs[rows, position] = every[ends[position] - len(rows) : ends[position]]
    return _Responses(tokens, logprobs, lengths, stopped, last)


def _filled(alive: np.ndarray) -> np.ndarray:
    """Return the rows that are alive, with the last of them filling the places of finished rows, so that few rows move.

    >>> _filled(np.array([True, False, True, False, True, True]))
    array([0, 5, 2, 4])
    """
    order = np.arange(np.count_nonzero(alive))
    holes = np.flatnonzero(~alive[: len(order)])
    order[holes] = np.flatnonzero(alive)[::-1][: len(holes)]
    return order


def _concat(parts: list[Ragged], dtype: torch.dtype) -> Ragged:
    """Return all rows of `parts`; a column without rows if there are none."""
    return Ragged.concat(parts) if parts else Ragged.from_rows([], dtype)

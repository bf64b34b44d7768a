"""The `hf` engine: batched sampling over a transformers model with a key-value cache, on any device.

Prompts are sorted by length and left-padded, so a step appends one column to all rows. Equal prompts (the samples of a
group) are read once and their cache is copied. Rows that have finished leave the batch as soon as there are enough of
them to pay for moving the others together.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlpack.batch.ragged import Ragged
from rlpack.rollout.errors import EngineError, SamplingError
from rlpack.rollout.sampling import sample, uniforms
from rlpack.rollout.types import Generations, SamplingParams

# Finished rows leave once they are this share of the running ones: moving costs about one step.
_COMPACT_SHARE = 1 / 8


class HFEngine:
    """Generates with a transformers model of its own; implements `rlpack.rollout.engine.Engine`.

    Attributes:
        policy_version: the number of weight publications received, 0 before the first.
    """

    def __init__(self, model: PreTrainedModel, *, pad_token_id: int = 0, max_num_seqs: int = 256) -> None:
        """Take over `model`; nobody else may train it or change its attention.

        Args:
            model: a decoder whose attention knows a cache (`sdpa`, `eager`), on its device.
            pad_token_id: any id of the vocabulary; it is masked wherever it stands.
            max_num_seqs: rows that run at one time.

        Raises:
            EngineError: the model's attention has no cache path.
        """
        attention = model.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise EngineError(f"the model's attention is {attention!r}; generation needs sdpa or eager")
        self.policy_version = 0
        self._model = model.eval()
        self._pad_token_id = pad_token_id
        self._batch_rows = max_num_seqs

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        """Return one response for each prompt, as `Engine.generate` says.

        Raises:
            SamplingError: a prompt is empty, or there is not one seed a row.
            EngineError: the model gave logits that are not finite.
        """
        if len(seeds) != prompts.num_rows:
            raise SamplingError(f"there are {len(seeds)} seeds for {prompts.num_rows} prompts; give one each")
        if prompts.num_rows and int(prompts.lengths.min()) == 0:
            raise SamplingError(f"prompt {int(prompts.lengths.argmin())} is empty; it needs at least one token")
        order = torch.argsort(prompts.lengths, stable=True)
        tokens, logprobs, reasons = [], [], np.zeros(prompts.num_rows, dtype=bool)
        for rows in order.split(self._batch_rows) if prompts.num_rows else ():
            decoder = _Decoder(self._model, prompts.select(rows), params.max_new_tokens, self._pad_token_id)
            part = _respond(decoder, params, seeds[rows.numpy(force=True)], self._model.device)
            # Copied outside of inference mode, whose own tensors may never meet autograd.
            lengths = part.lengths.clone()
            tokens.append(Ragged.from_padded(part.tokens, lengths))
            logprobs.append(Ragged.from_padded(part.logprobs, lengths))
            reasons[rows.numpy(force=True)] = part.stopped.numpy(force=True)
        back = torch.argsort(order)
        token_ids = _concat(tokens, torch.int64).select(back).to("cpu")
        versions = torch.full(token_ids.values.shape, self.policy_version, dtype=torch.int32)
        return Generations(
            token_ids=token_ids,
            logprobs=_concat(logprobs, torch.float32).select(back).to("cpu"),
            policy_versions=token_ids.with_values(versions),
            finish_reasons=["stop" if stopped else "length" for stopped in reasons],
        )

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy `state` into the model; weights tied to one that is given may be missing.

        Raises:
            EngineError: a name or a shape doesn't fit; nothing has been copied then.
        """
        own = self._model.state_dict()
        given = {own[name].data_ptr() for name in state if name in own}
        missing = sorted(name for name in own if name not in state and own[name].data_ptr() not in given)
        unknown = sorted(name for name in state if name not in own)
        misshapen = sorted(name for name in state if name in own and state[name].shape != own[name].shape)
        if missing or unknown or misshapen:
            raise EngineError(f"weights don't fit: missing {missing}, unknown {unknown}, of another shape {misshapen}")
        for name, weight in state.items():
            own[name].copy_(weight)
        self.policy_version = version


class _Decoder:
    """The rows that run: their cache, their attention mask, their next positions (R rows)."""

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit: int, pad_token_id: int) -> None:
        """Make room for `limit` tokens after the longest prompt."""
        self._model, self._pad_token_id = model, pad_token_id
        self._prompts = prompts.to(model.device)
        self._width = int(prompts.lengths.max())
        self._positions = self._prompts.lengths.clone()
        columns = torch.arange(self._width + limit, device=model.device)
        self._mask = columns >= self._width - self._positions[:, None]  # [R, width + limit]
        self._cache = DynamicCache(config=model.config)

    def read(self) -> Tensor:
        """Run the prompts, equal ones once; return the logits after each, [R, V]."""
        lengths = self._prompts.lengths
        tokens = torch.full(self._mask[:, : self._width].shape, self._pad_token_id, device=lengths.device)
        tokens[self._mask[:, : self._width]] = self._prompts.values
        # With its length a padded row says which prompt it is, even if the padding is a token of prompts too.
        unique, copies = torch.unique(torch.cat([lengths[:, None], tokens], 1), dim=0, return_inverse=True)
        columns = torch.arange(self._width, device=lengths.device)
        padding = self._width - unique[:, :1]
        logits = self._forward(unique[:, 1:], (columns - padding).clamp(min=0), columns >= padding)
        self._cache.batch_select_indices(copies)
        return logits[copies]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, int64 [R]; return the logits after it, [R, V]."""
        self._width += 1
        logits = self._forward(tokens[:, None], self._positions[:, None], self._mask[:, : self._width])
        self._positions += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Let only `rows` (int64) run on."""
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run the model on the newest columns; return the last one's logits."""
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


class _Responses(NamedTuple):
    """What a batch of rows became; entries after a row's length mean nothing."""

    tokens: Tensor  # int64 [B, limit]
    logprobs: Tensor  # f32 [B, limit]
    lengths: Tensor  # int64 [B]
    stopped: Tensor  # bool [B]


@torch.inference_mode()
def _respond(decoder: _Decoder, params: SamplingParams, seeds: np.ndarray, device: torch.device) -> _Responses:
    """Generate until every row has stopped or is at the limit."""
    shape = (len(seeds), params.max_new_tokens)
    tokens, logprobs = torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device)
    lengths = torch.full((len(seeds),), params.max_new_tokens, device=device)
    stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
    running = torch.arange(len(seeds), device=device)
    stopped = torch.zeros(len(seeds), dtype=torch.bool, device=device)
    logits = decoder.read()
    for position in range(params.max_new_tokens):
        drawn, scores = sample(logits, params, uniforms(seeds[running.numpy(force=True)], position))
        tokens[running, position], logprobs[running, position] = drawn, scores
        ending = running[torch.isin(drawn, stops) & ~stopped[running]]
        lengths[ending], stopped[ending] = position + 1, True
        alive = (~stopped[running]).nonzero().squeeze(1)
        if alive.numel() == 0 or position + 1 == params.max_new_tokens:
            break
        if alive.numel() <= (1 - _COMPACT_SHARE) * running.numel():
            decoder.keep(alive)
            running, drawn = running[alive], drawn[alive]
        logits = decoder.step(drawn)
    return _Responses(tokens, logprobs, lengths, stopped)


def _concat(parts: list[Ragged], dtype: torch.dtype) -> Ragged:
    """Return all rows of `parts`; without a part, no row."""
    return Ragged.concat(parts) if parts else Ragged.from_rows([], dtype)

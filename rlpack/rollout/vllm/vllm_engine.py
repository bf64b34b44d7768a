"""The `vllm` engine: vLLM's front end in this process, its model in a separate process (EngineCore).

Each row is a separate request with its own seed and deadline. vLLM batches requests in flight token by token, so a
short response makes room for the next one at once. New weights reach EngineCore through shared memory, or by CUDA IPC
(`weight_sender`, `shared_weights`).
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rlpack.batch.ragged import Ragged
from rlpack.batch.weight_layout import WeightLayout
from rlpack.config.schema import Model, Placement, Rollout
from rlpack.data.tokenization import pad_id
from rlpack.models.loading import build_meta_model
from rlpack.rollout.deterministic import check_deterministic
from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.errors import EngineDeadlineError, EngineError, SamplingError
from rlpack.rollout.layout_check import check_layout, tied_names
from rlpack.rollout.types import Generations, SamplingParams
from rlpack.rollout.vllm.arguments import Shape, engine_arguments, engine_length
from rlpack.rollout.vllm.deadlines import Deadlines
from rlpack.rollout.vllm.device_buffers import DeviceBuffers
from rlpack.rollout.vllm.event_loop import EventLoop, gather
from rlpack.rollout.vllm.hangs import Hangs
from rlpack.rollout.vllm.initial_weights import initial_weights
from rlpack.rollout.vllm.requests import check_sampling, prompt_logprobs, to_generations, to_prompt
from rlpack.rollout.vllm.row_requests import RefusedError, Row, RowRequests
from rlpack.rollout.vllm.runtime_adapters import RuntimeAdapters, adapter_arguments
from rlpack.rollout.vllm.sleep_cycle import SleepCycle
from rlpack.rollout.vllm.start_engine import StartedEngine, start_engine
from rlpack.rollout.vllm.weight_sender import WeightSender

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Extra time for requests after their own deadline, in case the event loop hangs.
_GRACE_S = 10.0


class VLLMEngine:
    """Generates with vLLM; implements `rlpack.rollout.engine.Engine`."""

    def __init__(
        self,
        engine: StartedEngine,
        loop: EventLoop,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        max_length: int,
        deadlines: Deadlines,
        takes_adapters: bool = False,
        sleep_level: int = 0,
    ) -> None:
        """Take a running engine.

        Args:
            engine: the front end, made in `loop`, and its log.
            loop: runs its coroutines.
            model: the same model in transformers, on the meta device, for names and shapes.
            dtype: in which weights arrive.
            max_length: longest prompt and response together, in tokens.
            deadlines: deadlines of responses, and of calls that load weights, or read or change the engine's state.
            takes_adapters: whether updates contain only the matrices of adapters instead of all weights.
            sleep_level: what `sleep` frees; see `SleepCycle`.
        """
        self.dtype = dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._started = engine
        self._engine: Any = engine.front_end
        self._log = engine.log
        self._loop, self._model = loop, model
        self._max_length, self._deadline = max_length, deadlines.start  # until the first call has returned
        self._request_timeout_s = deadlines.request_s
        self._aliases = tied_names(model)
        self._adapters = RuntimeAdapters(model) if takes_adapters else None
        self._next_request = 0
        self._rows = RowRequests(engine.front_end, self._request, self._explain)
        self._sender = WeightSender(engine.front_end, loop, self._explain, deadlines.control)
        self._cycle = SleepCycle(engine.front_end, self._control, sleep_level)
        self._cause: str | None = None
        self._hangs = Hangs(engine.front_end, engine.processes, deadlines.request_s, self._rows.fail)
        self._test: Callable[[VLLMEngine], None] | None = None
        self._policy_version = 0
        self.policy_version = 0  # vLLM's own first version is not a number
        self._deadline = deadlines.control

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
        """Start vLLM with the model of the `model` section; with a sleep level, it sleeps until its first update.

        With `rollout.lora=adapter`, `settings.vllm` has the adapters' rank as `max_lora_rank`.

        Raises:
            EngineError: vLLM is missing, doesn't fit, did not start, or isn't deterministic although it has to be.
            ModelError: the section describes no language model, or the tokenizer has more tokens than the model.
        """
        meta = build_meta_model(model, vocab_size=len(tokenizer), pad_token_id=pad_id(tokenizer))
        dtype = settings.dtype or "fp32"
        max_length = engine_length(max_length)
        deadlines = Deadlines.of(settings, placement or Placement())
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        loop, built = EventLoop("rlpack-vllm"), None
        try:
            with initial_weights(model, tokenizer, seed) as source:
                arguments = engine_arguments(
                    settings, Shape.of(meta.config), model=source, dtype=dtype, max_length=max_length, gpus=gpus
                )
                if settings.lora == "adapter":
                    arguments |= adapter_arguments(meta, arguments["max_lora_rank"])
                remote = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
                engine = start_engine(
                    arguments | remote,
                    loop,
                    deadline=deadlines.start,
                    on_gpu=gpus > 0,
                    deterministic=settings.deterministic,
                )
        except BaseException:
            loop.close()
            raise
        try:
            built = cls(
                engine,
                loop,
                meta,
                dtype=_DTYPES[dtype],
                max_length=max_length,
                deadlines=deadlines,
                takes_adapters=settings.lora == "adapter",
                sleep_level=(settings.sleep_level or 0) if gpus else 0,
            )
            built._rows.keeps_cache = settings.kv_cache == "keep"
            built._sender.num_workers = max(1, gpus)
            built._sender.open(DeviceBuffers([torch.device("cuda", index) for index in range(gpus)]) if gpus else None)
            if settings.deterministic:
                test = partial(check_deterministic, max_length=max_length, max_num_seqs=settings.max_num_seqs)
                built._test_when_usable(test)
            built.sleep()
        except BaseException:
            engine.stop()
            if built is not None:
                built.close()
            loop.close()
            raise
        return built

    @property
    def policy_version(self) -> int:
        """Return the number of weight publications; vLLM stamps it on every token."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._control(self._engine.update_weight_version(str(version)), "take a policy version")
        self._policy_version = version

    def generate(self, prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> Generations:
        """Return one response for each prompt, as documented at `Engine.generate`.

        Raises:
            SamplingError: a prompt is empty or too long, or there is not one seed per row.
            EngineError: vLLM died, missed a deadline, or returned an invalid response.
        """
        self.begin(range(prompts.num_rows), prompts, params, seeds)
        responses: dict[int, Any] = {}
        # Each row has its own deadline; this one is for an event loop that hangs.
        deadline = time.monotonic() + self._request_timeout_s + _GRACE_S
        while len(responses) < prompts.num_rows:
            if (left := deadline - time.monotonic()) <= 0:
                raise EngineError(f"vLLM's front end answered {len(responses)} of {prompts.num_rows} rows, then hung")
            for row in self.finished(left):
                if row.failure:
                    self.abort()
                    raise EngineError(f"row {row.key}: {row.failure}")
                responses[row.key] = row.response
        return self.to_generations([responses[row] for row in range(prompts.num_rows)], params)

    def begin(self, keys: Sequence[int], prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> None:
        """Start a request for each row; see `StreamingEngine.begin`."""
        if len(seeds) != prompts.num_rows:
            raise SamplingError(f"there are {len(seeds)} seeds for {prompts.num_rows} prompts; give one each")
        if prompts.num_rows == 0:
            return
        self._cycle.check_awake()
        shortest, longest = int(prompts.lengths.min()), int(prompts.lengths.max())
        if shortest == 0:
            raise SamplingError(f"prompt {int(prompts.lengths.argmin())} is empty; it needs at least one token")
        if longest + params.max_new_tokens > self._max_length:
            raise SamplingError(
                f"prompt {int(prompts.lengths.argmax())} has {longest} tokens; with {params.max_new_tokens} new ones "
                f"that is over the engine's {self._max_length}. Raise data.max_prompt_tokens, from which the engine's "
                "length is derived"
            )
        check_sampling(params)
        rows = [
            Row(key, row.numpy(), int(seed), params)
            for key, row, seed in zip(keys, prompts.rows(), seeds.astype(np.uint64), strict=True)
        ]
        self._loop.run(self._rows.begin(rows, self._policy_version), self._deadline, "take new requests")

    def finished(self, timeout_s: float) -> list[FinishedRow]:
        """Return the rows that ended; see `StreamingEngine.finished`."""
        return self._rows.finished(timeout_s)

    def to_generations(self, responses: Sequence[Any], params: SamplingParams) -> Generations:
        """Return the rows' tokens; see `StreamingEngine.to_generations`."""
        return to_generations(responses, params)

    def abort(self, keys: Sequence[int] | None = None) -> None:
        """Cancel the requests of rows, by default of all, and drop their results."""
        self._loop.run(self._rows.cancel(keys), self._deadline, "cancel its requests")
        if keys is None:
            self._started.meter.end()

    def interrupt(self) -> None:
        """Stop sampling, and keep what was sampled; see `StreamingEngine.interrupt`.

        Raises:
            EngineError: vLLM died, or missed a deadline.
        """
        self._control(self._rows.interrupt(), "interrupt its requests")
        self._started.meter.end()

    def resume(self) -> None:
        """Continue interrupted rows; see `StreamingEngine.resume`.

        Raises:
            EngineError: vLLM missed a deadline.
        """
        self._control(self._rows.resume(self._policy_version), "continue its requests")

    def sleep(self) -> None:
        """Free GPU memory; see `StreamingEngine.sleep`."""
        self.abort()
        self._cycle.sleep()

    def wake(self) -> bool:
        """Get ready to generate; see `StreamingEngine.wake`."""
        return self._cycle.wake()

    @property
    def is_alive(self) -> bool:
        """Return whether EngineCore runs."""
        return self._engine is not None and self._hangs.cause is None and not self._engine.errored

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Return log p(token | tokens before it), f32 [R, L], as documented at `Engine.logprobs`."""
        self._cycle.check_awake()
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "flat_logprobs": True, "detokenize": False, "seed": 0}
        requests = [self._request(to_prompt(row.tolist(), self._policy_version), sampling) for row in token_ids]
        outputs = self._control(gather(requests), "score a prompt")
        return torch.stack([prompt_logprobs(output, token_ids.shape[1]) for output in outputs])

    def check_weights(self, layout: WeightLayout) -> None:
        """Check names and shapes, and drop an update that failed; weights tied to one that is sent may be missing.

        Raises:
            EngineError: a name or a shape does not fit the model.
        """
        if self._adapters is not None:
            self._adapters.open(layout)
            return
        check_layout(self._model, layout)
        with self._hangs.ending():
            self._sender.restart()

    def load_bucket(self, weights: Mapping[str, Tensor]) -> None:
        """Send one bucket of weights to EngineCore, which loads it while the next one is prepared.

        Raises:
            BucketError: an earlier bucket was not loaded, or the deadline passed.
            EngineError: an earlier call of the update has failed.
        """
        if self._adapters is not None:
            self._adapters.add(weights)
        else:
            self._cycle.prepare_update()
            with self._hangs.ending():
                self._sender.send(self._checkpoint_names(weights))

    def finish_update(self) -> None:
        """Use the weights that arrived, and forget all cached keys and values of older ones, unless rows keep them.

        Raises:
            BucketError: a bucket was not loaded.
            EngineError: no bucket arrived, weights are missing, or the deadline passed.
        """
        if self._adapters is not None:
            self._cycle.wake()
            self._control(self._adapters.load(self._engine), "load an adapter")
        else:
            with self._hangs.ending():
                self._sender.finish()
            self._cycle.end_update()
        if not self._rows.keeps_cache and not self._control(
            self._engine.reset_prefix_cache(), "reset its prefix cache"
        ):
            raise EngineError("vLLM kept cached keys and values of older weights: requests are in flight")
        if self._test is not None:
            self._test_when_usable(self._test)

    def close(self) -> None:
        """End EngineCore; the engine can't be used afterwards."""
        if self._engine is None:
            return
        self._started.stop()
        self._engine = None
        self._loop.close()
        self._sender.close()

    def _test_when_usable(self, test: Callable[["VLLMEngine"], None]) -> None:
        """Run a test of the engine once: now, or after the first adapter is loaded, as adapters use other kernels."""
        has_to_wait = self._adapters is not None and self._adapters.in_use is None
        self._test = test if has_to_wait else None
        if not has_to_wait:
            test(self)

    def _checkpoint_names(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights as a checkpoint has them: transformers' fused ones split, and tied ones under each name.

        vLLM keeps a packed copy of a tied output layer, which it updates only if it gets the weight under that layer's
        name.
        """
        named = dict(weights)
        for name, aliases in self._aliases.items():
            if name in weights:
                named |= dict.fromkeys(aliases, weights[name])  # `check_layout` refuses aliases that are sent, too
        return revert_weight_conversion(self._model, named)

    def _explain(self, error: Exception) -> str:
        """Return the cause of an error raised by vLLM; once vLLM has ended, it is the same for all requests."""
        if self.is_alive:
            return self._log.explain(error)
        if self._cause is None:
            self._cause = self._hangs.cause or ": ".join(
                filter(None, (self._started.death(), self._log.explain(error)))
            )
        return self._cause

    async def _request(self, prompt: dict[str, Any], sampling: dict[str, Any]) -> Any:
        """Return the finished result of one request."""
        from rlpack.rollout.vllm import library

        self._started.meter.begin()
        self._next_request += 1
        name = f"{self._next_request}"
        final, adapter = None, self._adapters and self._adapters.in_use
        sampling_params = library.SamplingParams(**sampling, output_kind=library.RequestOutputKind.FINAL_ONLY)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                async for output in self._engine.generate(prompt, sampling_params, name, lora_request=adapter):
                    final = output
        except TimeoutError:
            self._hangs.check()
            raise EngineDeadlineError(
                f"request {name} got no response within rollout.request_timeout_s={self._request_timeout_s:g} s at "
                f"policy version {self._policy_version}"
            ) from None
        except library.RetryableRequestError as error:
            raise RefusedError(f"vLLM refused request {name}: {error}") from error
        if final is None:
            raise EngineError(f"vLLM ended request {name} without a result")
        return final

    def _control(self, coroutine: Any, what: str) -> Any:
        """Run a call that changes or reads the engine's state, and describe it in its errors."""
        with self._hangs.ending():
            try:
                return self._loop.run(coroutine, self._deadline, what)
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"vLLM could not {what}: {self._explain(error)}") from error

"""The rollout role: samples responses with its own copy of the policy."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import Bucket
from rlpack.batch.weight_layout import WeightForm, WeightLayout
from rlpack.config.roles import gpus_per_rank, longest_rollout, shares_gpus, sleep_level
from rlpack.config.schema import Config, Rollout
from rlpack.rollout.assemble import assemble
from rlpack.rollout.bucket_receiver import BucketReceiver
from rlpack.rollout.canary import CANARY_LENGTH, CanaryTolerance, calibrated, canary_tolerance, check_canary
from rlpack.rollout.device_memory import used_bytes
from rlpack.rollout.engine import STREAMING_ENGINES, Engine, StreamingEngine, engine_class
from rlpack.rollout.errors import CanaryError, EngineError
from rlpack.rollout.in_flight import RowsInFlight
from rlpack.rollout.types import Generations, SamplingParams, TrajectoryBatch
from rlpack.rollout.usable_responses import usable_responses
from rlpack.rollout.vllm.argument_names import SHARE_WITH_GIVEN_CACHE
from rlpack.worker import RankContext, Worker, broadcast, one_rank, rank_zero, sharded

logger = logging.getLogger(__name__)

# vLLM's share, weights included, of the memory of a GPU that other roles also use. Their weights stay there while vLLM
# is awake.
_SHARED_GPU = 0.5
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Columns of `RolloutWorker.advance` that say which rows failed, and why.
FAILURE_COLUMNS = ("engine_failure", "engine_has_failed", "engine_version")
_COLUMNS = (
    *("input_ids", "response_mask", "rollout_logprobs", "policy_version", "response_lengths"),
    *("finish_reason", "completion", "group_ids", "uid"),
)


class RolloutWorker(Worker):
    """One rank of a generation engine."""

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        canary_tolerance: CanaryTolerance,
        adapters_only: bool = False,
        rebuild: Callable[[], StreamingEngine] | None = None,
    ) -> None:
        """Wrap an engine.

        Args:
            context: the rank's place in the pool.
            engine: the engine.
            tokenizer: the policy's tokenizer.
            canary_tolerance: bounds on the differences from the trainer's log-probs.
            adapters_only: whether the engine takes only the matrices of adapters.
            rebuild: starts another engine of the same kind; None for an engine that is not replaced.
        """
        super().__init__(context)
        self._adapters_only, self._rebuild = adapters_only, rebuild
        self._in_flight: RowsInFlight | None = None
        self._is_unhealthy = self._is_interrupted = False
        self._engine = engine
        self._layout: WeightLayout | None = None
        self._tokenizer = tokenizer
        self._canary_tolerance, self._is_calibrated = canary_tolerance, False
        self._received = BucketReceiver("rollout")

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Build the engine that `rollout.engine` names; the actor's weights reach it before the first call."""
        settings, adapters_only = _engine_settings(config), config.rollout.lora == "adapter"
        build = partial(
            engine_class(settings.engine).from_settings,
            config.model,
            settings,
            tokenizer,
            device=context.torch_device,
            seed=config.seed,
            max_length=max(longest_rollout(config), CANARY_LENGTH),
            placement=config.placement,
        )
        engine = build()
        tolerance = canary_tolerance(engine.dtype, _DTYPES[config.actor.precision])
        rebuild = cast(Callable[[], StreamingEngine], build) if settings.engine in STREAMING_ENGINES else None
        return cls(
            *(context, engine, tokenizer), canary_tolerance=tolerance, adapters_only=adapters_only, rebuild=rebuild
        )

    @sharded(reads=("input_ids", "seeds", "group_ids", "uid"), returns=_COLUMNS)
    def generate(self, shard: BatchedDataDict, params: SamplingParams) -> BatchedDataDict:
        """Sample one response for each row.

        Args:
            shard: `input_ids`, the prompts; `seeds` int64 [B], the random seed of each row; `group_ids` and `uid`.
            params: how tokens are sampled.

        Returns:
            The columns of `rlpack.rollout.assemble.assemble`, and `completion`, the response as text.

        Raises:
            EngineError: an update of the weights is under way or failed.
        """
        with EngineError.at_version(self._engine.policy_version):
            self._received.check_usable()
            generations = self._engine.generate(shard["input_ids"], params, shard["seeds"].numpy())
            return self._rows(shard, generations)

    @one_rank(reads=("input_ids", "seeds", "group_ids", "uid"), returns=(*_COLUMNS, *FAILURE_COLUMNS))
    def advance(
        self, rows: BatchedDataDict, params: SamplingParams, generation: int, oldest: int, timeout_s: float, enough: int
    ) -> BatchedDataDict:
        """Start more rows of a generation, and return those that have ended.

        The call ends as soon as a group has ended, a row has failed, or `enough` rows have ended.

        Args:
            rows: as for `generate`; may be empty.
            params: how tokens are sampled, the same in all calls of the generation.
            generation: number of the generation that the rows belong to.
            oldest: number of the oldest generation that is waited for; rows of earlier ones are aborted.
            timeout_s: longest wait, in seconds.
            enough: number of ended rows at which to return, to make room for waiting rows; 0 if none wait.

        Returns:
            The columns of `generate`; `engine_failure`: why a row has no response, "" if it has one;
            `engine_has_failed`: whether the engine has to be replaced before it gets rows again; and `engine_version`:
            policy version of the engine when the row ended, int64 [B].

        Raises:
            EngineError: an update of the weights is under way or failed.
        """
        engine = cast(StreamingEngine, self._engine)
        with EngineError.at_version(engine.policy_version):
            self._received.check_usable()
            if self._in_flight is None:
                self._in_flight = RowsInFlight(engine)
            self._in_flight.abandon(oldest)
            self._in_flight.begin(rows, params, generation)
            ended = self._in_flight.ended(generation, timeout_s, enough)
            self._is_unhealthy |= any(ended.has_engine_failed)
            generations, failures = usable_responses(engine, ended)
            return self._rows(ended.rows, generations).union(
                {
                    "engine_failure": failures,
                    "engine_has_failed": torch.full((len(failures),), self._is_unhealthy, dtype=torch.bool),
                    "engine_version": torch.tensor(ended.versions, dtype=torch.int64),
                }
            )

    @broadcast
    def interrupt(self) -> None:
        """Stop sampling until `resume`; rows in flight keep the tokens sampled so far."""
        engine, self._is_interrupted = cast(StreamingEngine, self._engine), True
        if self._is_unhealthy:  # it is replaced before weights arrive; a hung one would not answer
            return
        try:
            engine.interrupt()
        except EngineError as error:
            logger.warning("the engine of rank %d can't be interrupted, and is replaced: %s", self.context.rank, error)
            self._is_unhealthy = True

    @broadcast
    def sleep(self) -> tuple[int, int]:
        """Put the engine to sleep; it frees GPU memory, and can't generate until it is woken or gets new weights.

        An engine that has failed, or that dies or hangs during this call, is closed, since other roles need its memory.
        It is replaced later.

        Returns:
            The memory in use on the rank's GPUs before and after, in bytes.
        """
        before, engine = used_bytes(self.context.torch_device), cast(StreamingEngine, self._engine)
        if not self._is_unhealthy:  # one that hangs would not answer
            with self._noting_death():
                engine.sleep()
        if self._is_unhealthy:
            engine.close()
        return before, used_bytes(self.context.torch_device)

    @broadcast
    def wake(self) -> bool:
        """Wake the engine; return False if it failed or has no usable weights, which must then be published again."""
        is_awake = False
        if not self._is_unhealthy:
            with self._noting_death():
                is_awake = cast(StreamingEngine, self._engine).wake()
        if self._is_unhealthy:
            return False
        if not is_awake:
            self._received.require_update("the engine discarded its weights to sleep")
        return self._received.is_usable

    @broadcast
    def replace_failed_engine(self) -> bool:
        """Start a new engine if this rank's engine can no longer be used; weights have to be published to it next.

        Returns:
            Whether a new engine was started.
        """
        engine = cast(StreamingEngine, self._engine)
        if self._rebuild is None or (engine.is_alive and not self._is_unhealthy):
            return False
        logger.warning("rank %d of role rollout starts a new engine in place of one that failed", self.context.rank)
        engine.close()
        self._engine, self._is_unhealthy = self._rebuild(), False
        if self._layout is not None:  # the next publication doesn't agree on it again
            self._engine.check_weights(self._layout)
        if self._is_interrupted:
            self.interrupt()
        if self._in_flight is not None:
            self._in_flight.move_to(self._engine)
        self.require_weights()
        return True

    @broadcast
    def require_weights(self) -> None:
        """Refuse to sample until weights are published; no effect before a layout of weights has been agreed on."""
        self._received.require_update("the engine is new, but no weights have been published to it")

    def _rows(self, rows: BatchedDataDict, generations: Generations) -> BatchedDataDict:
        """Return the columns of a rollout batch, with the ids of the rows."""
        columns = assemble(
            TrajectoryBatch.single_turn(rows["input_ids"], generations),
            group_ids=rows["group_ids"],
            uids=rows["uid"],
            vocab_size=self._engine.vocab_size,
            policy_version=self._engine.policy_version,
        )
        # Row by row: batch_decode returns one empty text for no rows, and a rank may have none.
        texts = [self._tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in generations.token_ids.rows()]
        return rows.keep([]).union(dict(columns) | {"completion": texts})

    @rank_zero
    def weights_form(self) -> WeightForm:
        """Return how the engine receives weights."""
        return WeightForm(self._engine.dtype, self._adapters_only)

    @broadcast
    def check_weights(self, layout: WeightLayout) -> None:
        """Check that weights of this layout fit the engine.

        Raises:
            EngineError: a name or a shape does not fit.
        """
        self._engine.check_weights(layout)
        self._layout = layout
        self._received.open(len(layout))

    @broadcast
    def load_bucket(self, bucket: Bucket, version: int) -> None:
        """Check one bucket of the actor's weights and copy it into the engine.

        An engine that dies, and can be replaced, gets no more buckets; `publish` reports it.

        Raises:
            EngineError: it is not the bucket that is due or was damaged, so nothing is copied; or the engine failed to
                load it or an earlier one.
        """
        if self._is_dead:
            return
        with (
            EngineError.at_version(version),
            self._noting_death(),
            self._received.receive(bucket, version) as weights,
        ):
            self._engine.load_bucket(weights)

    @broadcast
    def publish(self, expected: np.ndarray, token_ids: Tensor, version: int, may_replace: bool = False) -> float:
        """Check that all buckets arrived, and check the canary; then use the weights as policy version `version`.

        Rows that were interrupted wait for `resume`.

        Args:
            expected: the trainer's log-probs of the canary, f32 [R, L].
            token_ids: the canary, int64 [R, L].
            version: number of weight publications, this one included.
            may_replace: return infinity if the engine fails the canary or has died, and can be replaced
                (`replace_failed_engine`); it refuses to sample until the weights are published again.

        Returns:
            The largest difference between the engine's and the trainer's log-probs, in nats.

        Raises:
            EngineError: a bucket has not arrived, or was not loaded.
            CanaryError: the largest or the mean difference exceeds its tolerance.
        """
        try:
            with EngineError.at_version(version):
                gap = self._use_weights(torch.tensor(expected), token_ids, version)
        except EngineError as error:
            is_replaced = self._is_dead or (isinstance(error, CanaryError) and self._rebuild is not None)
            if not (may_replace and is_replaced):
                raise
            logger.warning("%s; the engine of rank %d is replaced", error, self.context.rank)
            self._is_unhealthy = True
            return math.inf
        self._received.close()
        return gap

    @broadcast
    def resume(self) -> None:
        """Continue the rows that were interrupted, once the engines of all ranks have passed the canary.

        An engine that failed, or that dies or hangs during this call, is replaced later.
        """
        if self._is_interrupted and not self._is_unhealthy:
            with self._noting_death():
                cast(StreamingEngine, self._engine).resume()
        self._is_interrupted = False

    def _use_weights(self, expected: Tensor, token_ids: Tensor, version: int) -> float:
        """Apply the weights that arrived, check the canary and return its gap.

        Arguments and errors are the same as for `publish`.
        """
        with self._received.complete(version):
            self._engine.finish_update()
        logprobs = self._engine.logprobs(token_ids)
        gap = check_canary(logprobs, expected, token_ids, tolerance=self._canary_tolerance, version=version)
        if not self._is_calibrated:
            self._canary_tolerance, self._is_calibrated = calibrated(self._canary_tolerance, logprobs, expected), True
        self._engine.policy_version = version
        return gap

    @contextmanager
    def _noting_death(self) -> Iterator[None]:
        """Mark the engine as failed if an error in the block is due to its death, or to a hang, which kills it.

        Raises:
            EngineError: any other error.
        """
        try:
            yield
        except EngineError as error:
            if not self._is_dead:
                raise
            logger.warning("%s; the engine of rank %d is replaced", error, self.context.rank)
            self._is_unhealthy = True

    @property
    def _is_dead(self) -> bool:
        """Return whether the engine has died and can be replaced."""
        return self._rebuild is not None and not cast(StreamingEngine, self._engine).is_alive


def _engine_settings(config: Config) -> Rollout:
    """Return the `rollout` section, with the values that are derived from other sections filled in."""
    own: dict[str, object] = {}
    if config.rollout.lora == "adapter":
        own["max_lora_rank"] = config.actor.lora.rank
    if config.rollout.engine == "vllm" and (share := _gpu_share(config)) is not None:
        own["gpu_memory_utilization"] = share
    return config.rollout.model_copy(
        update={
            "dtype": config.rollout.dtype or config.actor.precision,
            "sleep_level": sleep_level(config),
            "vllm": own | config.rollout.vllm,
        }
    )


def _gpu_share(config: Config) -> float | None:
    """Return vLLM's share of the memory of each GPU; None for vLLM's default, and on CPUs."""
    if gpus_per_rank(config, "rollout") > 0 and config.rollout.kv_cache_gb is not None:
        return SHARE_WITH_GIVEN_CACHE
    return _SHARED_GPU if shares_gpus(config) else None

"""vLLM's statistics for `EngineMeter`."""

import logging
from typing import Any

from rlpack.rollout.engine_meter import EngineMeter

logger = logging.getLogger(__name__)


def stat_logger(meter: EngineMeter) -> type[Any]:
    """Return a class of vLLM's stat loggers that passes the statistics of each iteration to a meter.

    It derives from vLLM's Prometheus logger because vLLM adds one unless it is given one; that one would update some
    fifty metrics per iteration, none of which are read here. vLLM calls the statistics unstable, so a version without
    the ones that are read ends the recording, not the run.
    """
    from rlpack.rollout.vllm import library

    class MeteredStats(library.PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            self._is_on = True

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is None or not self._is_on:
                return
            try:
                waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
                tokens = 0 if iteration_stats is None else iteration_stats.num_generation_tokens
                meter.add(scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage, tokens)
            except (AttributeError, TypeError) as error:
                self._is_on = False
                logger.warning("vLLM's statistics can't be read, so the report has none of this engine: %s", error)

        def log(self) -> None: ...

        def log_engine_initialized(self) -> None: ...

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

        def record_admission_rejection(self, reason: str) -> None: ...

    return MeteredStats

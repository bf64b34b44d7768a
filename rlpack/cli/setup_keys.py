"""The overrides that turn a run's configuration, or the default one, into a setup of `rlpack simulate --async`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpack.cli.rates_of_run import config_of, gpus_of, late_window, pool_of
from rlpack.config.ahead_rules import new_engine_pool
from rlpack.packing.analysis.running_ahead import Setup


def setup_keys(setup: Setup, run_dir: Path) -> str:
    """Return the overrides, to be given after those of the run; anything but a run's directory has the default ones."""
    config = config_of(run_dir)
    of_publication = _in_flight(config) if setup.publish == "in_flight" and setup.lead else _drain(config, run_dir)
    of_pools = _new_pools(setup) if not config else _own_pools(setup, config)
    return " ".join([f"trainer.lead={setup.lead}", *of_publication, *of_pools])


def _in_flight(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what publications in flight need."""
    yield from ("rollout=vllm", "rollout.publish=in_flight")
    if (config.get("rollout") or {}).get("deterministic"):
        yield "rollout.deterministic=false"


def _drain(config: Mapping[str, Any], run_dir: Path) -> Iterator[str]:
    """Yield what resets settings that are valid only with publications in flight."""
    rollout = config.get("rollout") or {}
    if rollout.get("publish") == "in_flight":
        yield "rollout.publish=drain"
    if rollout.get("kv_cache") == "keep":
        yield "rollout.kv_cache=clear"
    if late_window(run_dir) > 1:
        yield "trainer.late_groups.window=1"


def _new_pools(setup: Setup) -> Iterator[str]:
    """Yield the pools of a setup, by presets."""
    if setup.lead:
        yield "placement=two_pools"
    yield f"placement.pools.main.ranks={setup.train_ranks}"
    if setup.lead:
        yield f"placement.pools.engines.ranks={setup.engine_ranks}"


def _own_pools(setup: Setup, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the changes of a run's pools, whether a preset or the run's command has defined them."""
    placement = config.get("placement") or {}
    pools, roles = placement.get("pools") or {}, placement.get("roles") or {}
    training, engines = pool_of(config, "actor"), pool_of(config, "rollout")
    yield f"placement.pools.{training}.ranks={setup.train_ranks}"
    if not setup.lead:
        if engines != training:
            yield from (f"placement.roles.{role}={training}" for role, pool in roles.items() if pool == engines)
            yield f"~placement.pools.{engines}"
        return
    moved = []
    if engines == training:
        engines = new_engine_pool(pools)
        gpus = gpus_of(config, "rollout")
        moved = [f"placement.pools.{engines}.gpus_per_rank={gpus:g}"] if gpus else []
        # A rank of engines with several GPUs can't have further roles.
        joins = pool_of(config, "reward") == training and gpus <= 1
        moved += [f"placement.roles.{role}={engines}" for role in ("rollout", *["reward"] * joins)]
    yield f"placement.pools.{engines}.ranks={setup.engine_ranks}"
    yield from moved

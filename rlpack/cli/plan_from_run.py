"""Read from a run what `rlpack plan` and `rlpack simulate` need: its lengths, and defaults for options."""

import argparse
import os
from pathlib import Path

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.config.hydra_text import as_argument
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.run_dir import LENGTHS, METRICS
from rlpack.observe.sinks import read_records
from rlpack.packing.analysis.data_rank import DataRank
from rlpack.packing.analysis.shared_prompts import SharedPrompts

# Options without effect on each batching mode.
_UNREAD = {
    "packed": {"length_multiple", "fixed_rows"},
    "dynamic": {"pad_to_multiple", "fixed_rows", "algorithm"},
    "fixed": {"pad_to_multiple", "max_tokens", "algorithm"},
}


def read_record(run_dir: Path) -> PlanRecord:
    """Return the record of a run's last plan.

    Raises:
        DataError: the directory has no such record, or it has no lengths.
    """
    if not os.path.exists(run_dir / LENGTHS):  # false in a directory that may not be read
        raise DataError(f"{run_dir} has no {LENGTHS}{_why_no_lengths(run_dir)}")
    record = PlanRecord.read(run_dir / LENGTHS)
    if not record.lengths:
        raise DataError(f"{run_dir / LENGTHS} has no lengths; give a run that took a step, or a file of lengths")
    return record


def _why_no_lengths(run_dir: Path) -> str:
    """Return why a directory has no lengths, and what to do."""
    if not os.path.isfile(run_dir / METRICS):
        return "; give a run's directory, or a file of lengths"
    if any(record["phase"] == "train" for record in read_records(run_dir / METRICS)):
        return ", in which a recipe stores the lengths of its training steps; give a file of lengths"
    return (
        ": the run took no training step, and lengths are stored from the first one on, after the warm-up; continue it "
        f"with {as_argument('run_dir', str(run_dir))} resume=auto, or give a file of lengths"
    )


def _prompts(arguments: argparse.Namespace, record: PlanRecord) -> SharedPrompts | None:
    """Return the prompts that rows share; None if none of the plans can share them."""
    packs = "compare" in arguments.given or vars(arguments).get("mode", "packed") == "packed"
    can_share = packs and arguments.pad_to_multiple == 1 and not record.whole_groups
    if not can_share or record.groups is None or record.prefixes is None:
        return None
    return SharedPrompts(np.array(record.groups, dtype=np.int64), np.array(record.prefixes, dtype=np.int64))


def _sharing(rank: DataRank) -> list[str]:
    """Return what to say about the devices that work on the same rows; nothing about a single one."""
    sizes = {"cp": rank.cp, "tp": rank.tp, "pp": rank.pp}
    texts = [
        f"{rank.num_ranks} devices a rank ({', '.join(f'{name} {size}' for name, size in sizes.items() if size > 1)})"
    ]
    if rank.cp > 1:
        texts.append(f"--max-tokens for each of the {rank.cp} ranks of cp")
    return texts if rank.num_ranks > 1 else []


def apply_record(arguments: argparse.Namespace, record: PlanRecord) -> str:
    """Set options that were not given from the run, and return a line that lists them.

    `simulate` keeps its own rank counts, and `--suggest` its own alignments.
    """
    batching, plans = record.batching, "mode" in vars(arguments)
    arguments.data_rank = rank = record.data_rank
    budget = None if batching.max_tokens is None else batching.max_tokens // rank.cp
    values = {"max_tokens": budget, "fixed_rows": batching.micro_batch_size}
    if vars(arguments).get("rows_per_rank") is None:  # a growing number of rows would mean more optimizer steps
        values["mini_batch_size"] = record.mini_batch_size
    if "suggest" not in arguments.given:
        values |= {"pad_to_multiple": batching.pad_to_multiple, "length_multiple": batching.length_multiple}
    if plans:
        values |= {"ranks": str(record.num_ranks), "mode": batching.mode, "algorithm": batching.algorithm}
    applied = {name: value for name, value in values.items() if value is not None and name not in arguments.given}
    vars(arguments).update(applied)
    arguments.base = batching
    if not arguments.given & {"hidden_size", "layers"}:
        arguments.cost = record.cost
        arguments.hidden_size, arguments.layers = record.shape or (arguments.hidden_size, arguments.layers)
    several = not plans or arguments.given & {"compare", "suggest", "picture"}
    unread = set() if several else _UNREAD[arguments.mode]
    if "compare" in arguments.given:
        unread = {"mode", "algorithm"}
    texts = [f"--{name.replace('_', '-')} {value}" for name, value in applied.items() if name not in unread]
    if arguments.cost is not None and "fit" not in arguments.given:
        texts.append("FLOPs of its model")
    if plans and batching.divisible_by > 1:
        texts.append(f"microbatches in multiples of {batching.divisible_by}")
    arguments.prompts = _prompts(arguments, record)
    if batching.share_prompts:
        texts.append(f"{'without ' if arguments.prompts is None else ''}batching.share_prompts")
    if record.whole_groups:
        texts.append("without keeping groups whole")
    texts += _sharing(rank)
    return f"as in step {record.step} of {arguments.lengths}: {', '.join(texts)}" if texts else ""

"""What `rlpack plan` and `rlpack simulate` take from a run: its lengths, and defaults of options."""

import argparse
from pathlib import Path

from rlpack.batch.errors import DataError
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.run_dir import LENGTHS

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
    if not (run_dir / LENGTHS).exists():
        raise DataError(f"{run_dir} has no {LENGTHS}; give a run's directory, or a file of lengths")
    record = PlanRecord.read(run_dir / LENGTHS)
    if not record.lengths:
        raise DataError(f"{run_dir / LENGTHS} has no lengths; give a run that took a step, or a file of lengths")
    return record


def apply_record(arguments: argparse.Namespace, record: PlanRecord) -> str:
    """Set options that were not given from the run, and return a line that lists them.

    `simulate` keeps its own rank counts, and `--suggest` its own alignments.
    """
    batching, plans = record.batching, "mode" in vars(arguments)
    values = {"max_tokens": batching.max_tokens, "fixed_rows": batching.micro_batch_size}
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
    several = not plans or arguments.given & {"compare", "suggest", "picture"}
    unread = set() if several else _UNREAD[arguments.mode]
    if "compare" in arguments.given:
        unread = {"mode", "algorithm"}
    texts = [f"--{name.replace('_', '-')} {value}" for name, value in applied.items() if name not in unread]
    if arguments.cost is not None and "fit" not in arguments.given:
        texts.append("FLOPs of its model")
    return f"as in step {record.step} of {arguments.lengths}: {', '.join(texts)}" if texts else ""

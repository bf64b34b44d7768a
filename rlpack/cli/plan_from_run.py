"""What `rlpack plan` and `rlpack simulate` take from a run: its lengths, and all that no option says otherwise."""

import argparse
from pathlib import Path

from rlpack.batch.errors import DataError
from rlpack.observe.report.plan_record import PlanRecord
from rlpack.observe.run_dir import LENGTHS

# Options that a mode of batching doesn't read.
_UNREAD = {
    "packed": {"length_multiple", "fixed_rows"},
    "dynamic": {"pad_to_multiple", "fixed_rows", "algorithm"},
    "fixed": {"pad_to_multiple", "max_tokens", "algorithm"},
}


def read_record(run_dir: Path) -> PlanRecord:
    """Return what the last step of a run was planned from.

    Raises:
        DataError: the directory holds no such record, or one without a length.
    """
    if not (run_dir / LENGTHS).exists():
        raise DataError(f"{run_dir} holds no {LENGTHS}; give a run's directory, or a file of lengths")
    record = PlanRecord.read(run_dir / LENGTHS)
    if not record.lengths:
        raise DataError(f"{run_dir / LENGTHS} holds no length; give a run that took a step, or a file of lengths")
    return record


def take_over(arguments: argparse.Namespace, record: PlanRecord) -> str:
    """Write what was not given over into the options, and return a line that says what.

    `simulate` keeps its growing clusters, and a search its choice of alignments.
    """
    batching, plans = record.batching, "mode" in vars(arguments)
    values = {"max_tokens": batching.max_tokens, "fixed_rows": batching.micro_batch_size}
    if vars(arguments).get("rows_per_rank") is None:  # rows that grow would be ever more optimizer steps
        values["mini_batch_size"] = record.mini_batch_size
    if "suggest" not in arguments.given:
        values |= {"pad_to_multiple": batching.pad_to_multiple, "length_multiple": batching.length_multiple}
    if plans:
        values |= {"ranks": str(record.num_ranks), "mode": batching.mode, "algorithm": batching.algorithm}
    taken = {name: value for name, value in values.items() if value is not None and name not in arguments.given}
    vars(arguments).update(taken)
    arguments.base = batching
    if not arguments.given & {"hidden_size", "layers"}:
        arguments.cost = record.cost
    several = not plans or arguments.given & {"compare", "suggest", "picture"}
    unread = set() if several else _UNREAD[arguments.mode]
    if "compare" in arguments.given:
        unread = {"mode", "algorithm"}
    said = [f"--{name.replace('_', '-')} {value}" for name, value in taken.items() if name not in unread]
    if arguments.cost is not None and "fit" not in arguments.given:
        said.append("FLOPs of its model")
    return f"as in step {record.step} of {arguments.lengths}: {', '.join(said)}" if said else ""

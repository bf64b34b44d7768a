"""The stored rollouts of a run that is resumed."""

import json
from pathlib import Path

from rlpack.observe.run_dir import read_samples
from rlpack.observe.sinks import ResumePoint
from rlpack.whole_files import write_whole


def truncate_samples(path: Path, point: ResumePoint) -> None:
    """Delete the stored rollouts after the resume point."""
    defaults = {"step": 0, "phase": "train"}  # for lines that lack them
    retained = [sample for sample in read_samples(path) if point.covers(defaults | sample)]
    if path.exists():
        write_whole(path, "".join(json.dumps(sample) + "\n" for sample in retained))

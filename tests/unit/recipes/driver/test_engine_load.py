"""Rows that wait for an engine, in the trace."""

import json
import time
from pathlib import Path

from rlpack.recipes.driver.engine_load import EngineLoad
from rlpack.spans import recorded_spans


def test_the_trace_gets_how_many_rows_waited_and_for_how_long(tmp_path: Path):
    load = EngineLoad()
    with recorded_spans(tmp_path, "driver"):
        load.queue(8)
        load.queue(-2)  # at once: nobody could see it
        time.sleep(0.02)
        load.queue(4)
        time.sleep(0.01)
        load.queue(-10)
        time.sleep(0.01)
        load.queue(1)
    (path,) = tmp_path.glob("*.jsonl")
    waits = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [(name, values) for name, _, _, values in waits] == [("router", {"waiting": 6}), ("router", {"waiting": 10})]
    assert waits[0][2] >= 20_000
    assert waits[0][1] + waits[0][2] == waits[1][1]

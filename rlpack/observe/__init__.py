"""Everything a run shows and records: metrics, sinks, the console, the run directory and the report.

`run` is what recipes use. `metric_entries` lists every metric, `sinks` write them (JSONL, TensorBoard, W&B), `console`
prints them, `run_dir` says where each file of a run is stored, `run_lock` keeps other processes out of it, `terminal`
deals with a closed one, and `text` makes untrusted text safe to print.
The package `report` makes the HTML page and its plots.
"""

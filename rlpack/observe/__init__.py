"""What one sees of a run: the metric table, sinks, the console, the report and the packing picture.

`run` is the face that recipes use. `names` is the table of metrics, `sinks` where they go, `console` what scrolls by,
`directory` what lies in a run's directory; `report`, `summary`, `figures` and `style` make the HTML page, and
`packing_picture` with `plan_record` the picture of one step's microbatches.
"""

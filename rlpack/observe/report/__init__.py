"""The report of a run: one HTML page, its plots and the packing picture.

`report` writes the page; `summary` makes the cards on top of it and the table at the end of a run; `plots` draws curves
and `step_times` bars, in the common `plot_style`. `plan_record` stores the inputs of a step's plan, from which
`packing_picture` draws the microbatches.
"""

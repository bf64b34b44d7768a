"""Costs, metrics and checks of plans.

`cost` models a sequence's cost, `metrics` measures plans, and `invariants` checks their guarantees. `layouts` maps
tokens to the slots of a microbatch. `simulation` forecasts step times, `calibration` fits its coefficients to measured
steps, and `traces` draws lengths to plan for.
"""

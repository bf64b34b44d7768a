"""`rlpack evaluate`: a model or a run's checkpoint on held-out prompts, without a trainer.

- `evaluate_model`: the loop over parts of the prompts; `evaluate_model_spec` says which roles it starts.
- `checkpoint_export`: the model folder of a run's checkpoint.
- `run_prompts`: whether the prompts are those that the run held out.
- `evaluation_session`: the roles and prompts, and the rows of a part.
"""

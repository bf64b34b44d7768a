"""Checks that need neither PyTorch nor a cluster: a wrong value, file or row is reported in about a second.

Importing PyTorch, transformers and a recipe takes several times as long, so `rlpack train` runs these first. Whatever
they can't decide is left to `rlpack.recipes.preflight`, which builds the model and the roles.

- `first_checks`: all of them, in the order in which problems are reported.
- `dataset_checks`: the rows, and the columns that rewards and judges read.
- `same_run`: a resumed run against the configuration that its checkpoint was written with.
- `model_paths`: the folders of models and tokenizers, absolute for ranks.
- `pool_checks`: the pools against this machine.
- `function_sources`: the loss and the advantage function, and their arguments.
- `reward_function_sources`: reward functions, where a job that will import them is submitted.
- `role_sources`: the methods of users' roles; `user_sources` parses modules.
- `model_files`: the folders of models and tokenizers.
- `served_model`: the model of `rlpack serve`.
- `model_settings`: a new model's settings; `transformers_sources` reads which exist, `annotations` compares types.
- `weight_patterns`: patterns of frozen weights and adapters, against `weight_names`.
"""

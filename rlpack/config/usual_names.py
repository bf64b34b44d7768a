"""Names that users guess for keys of the schema, where no key of a similar name is the right one."""

from collections.abc import Mapping

_RATE = "actor.optimizer.learning_rate"
_RATES = ("trainer.lr", "trainer.learning_rate", "optimizer.lr")
_EPOCHS = ("trainer.data_epochs", "passes over the training prompts; trainer.steps counts steps")
_GPUS = ("placement.pools.main.ranks", "one rank per GPU; placement=one_gpu and placement=eight_gpus are presets")
_SUBSET = ("data.subset", "the name of a dataset's configuration")

# The key that is meant, and a remark or "", by the path that a user wrote.
USUAL_NAMES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("lr", "actor.lr", "actor.optimizer.lr", *_RATES), (_RATE, "")),
    **dict.fromkeys(("critic.lr", "critic.optimizer.lr"), ("critic.optimizer.learning_rate", "")),
    "actor.lora.r": ("actor.lora.rank", ""),
    "actor.parallel.context_parallel": ("actor.parallel.cp", ""),
    "actor.parallel.tensor_parallel": ("actor.parallel.tp", ""),
    "actor.parallel.pipeline_parallel": ("actor.parallel.pp", ""),
    "trainer.train_batch_size": ("trainer.prompts_per_step", "prompts of one step"),
    "algorithm.name": ("recipe", "it chooses the algorithm, such as recipe=ppo"),
    **dict.fromkeys(("epochs", "num_epochs", "trainer.epoch", "trainer.epochs", "trainer.num_epochs"), _EPOCHS),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "trainer.gpus", "trainer.num_gpus", "placement.gpus"), _GPUS),
    **dict.fromkeys(("data.path", "data.file", "data.files", "data.train"), ("data.source", "")),
    **dict.fromkeys(("data.config_name", "data.config", "data.dataset_config", "data.configuration"), _SUBSET),
    "data.name": ("data.source", "data.subset is the name of a dataset's configuration"),
    **dict.fromkeys(("data.train_file", "data.dataset", "dataset"), ("data.source", "")),
    **dict.fromkeys(("data.val_file", "data.validation_file", "data.test_file"), ("data.validation_source", "")),
    **dict.fromkeys(("model.name", "model.name_or_path"), ("model.path", "")),
    **dict.fromkeys(("algorithm.kl", "algorithm.kl_beta"), ("algorithm.kl_coef", "")),
    "max_tokens": ("batching.max_tokens", "rollout.max_new_tokens limits a response"),
}

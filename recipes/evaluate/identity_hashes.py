"""Hashes of what an evaluation reads besides its arguments: it can't be continued once one of them has changed."""

import os
from hashlib import sha256
from pathlib import Path
from typing import cast

from rlpack.checkpoint.files import sha256_of
from rlpack.checkpoint.publish import MANIFEST
from rlpack.config.recipes import recipe_section
from rlpack.config.roles import started_roles
from rlpack.config.schema import Config, builtin_roles
from rlpack.config.sections.evaluation_settings import Evaluate
from rlpack.models.loading import load_config
from rlpack.recipes.evaluate.checkpoint_export import deletion_explained
from rlpack.user_code import find_module_file
from rlpack.workers.reward import function_specs

# `generation_config.json` names the tokens that end a response. Some models come with Python files.
_MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.bin", "*.py")


def model_hash(config: Config) -> str:
    """Return a hash of the model's files but those of its tokenizer; for a model of the Hub, of its name and commit."""
    checkpoint = recipe_section(config, Evaluate).checkpoint
    if checkpoint is not None:
        with deletion_explained(Path(checkpoint)):
            return sha256_of(Path(checkpoint) / MANIFEST)  # has the hash of each file
    folder = Path(os.path.expanduser(cast(str, config.model.path)))
    if not (folder / "config.json").is_file():
        # transformers sets the attribute only if the file came from the Hub.
        commit = vars(load_config(config.model)).get("_commit_hash")
        return sha256(f"{config.model.path} {commit}".encode()).hexdigest()
    digest = sha256()
    for file in sorted(file for pattern in _MODEL_FILES for file in folder.glob(pattern)):
        digest.update(f"{file.name} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


def code_hash(config: Config) -> str:
    """Return a hash of the files of reward functions' and custom roles' modules, without modules that these import."""
    targets = {config.roles[role].target for role in started_roles(config)}
    targets -= {role.target for role in builtin_roles().values()}
    targets |= {spec.target for spec in function_specs(config.reward).values()}
    digest = sha256()
    for module in sorted({target.partition(":")[0] for target in targets}):
        file = find_module_file(module)
        digest.update(f"{module} {'' if file is None else sha256_of(file)}\n".encode())
    return digest.hexdigest()

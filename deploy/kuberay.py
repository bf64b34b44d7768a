"""Generate deploy/rayjob.yaml for an image, a size and a run: `python deploy/kuberay.py --image … -- overrides`.

python deploy/kuberay.py --image registry/rlpack:cuda --workers 2 --gpus 8 -- run_dir=/shared/mine | kubectl apply -f -

Values are inserted into the parsed manifest, never into its text, so they can't inject YAML. The config is checked as
in `rlpack submit`, and against the devices of the nodes. A manifest uploads nothing, so a run that needs files of this
directory is refused.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlpack.cli.environment import targets_of
from rlpack.cli.hydra_flags import DIRECTORY_FLAGS, values_of
from rlpack.cli.submit_checks import JOINS, checked_config
from rlpack.config import evaluation_sets
from rlpack.config.errors import ConfigError
from rlpack.config.roles import pools_in_use
from rlpack.config.schema import Config
from rlpack.config.sections.submission import STOP_WAIT
from rlpack.distributed.capacity import check_capacity
from rlpack.distributed.errors import PlacementError
from rlpack.models.errors import ModelError
from rlpack.path_suggestions import DATA_FILES
from rlpack.user_code import find_module_file

MANIFEST = Path(__file__).parent / "rayjob.yaml"
SECRETS_DIR = "/etc/rlpack-secrets"  # where the manifest mounts them


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the manifest and return 0, or print an error and return 2."""
    parsed = _parser().parse_args(arguments)
    words = [*(() if _sets(parsed.overrides, "resume") else ("resume=auto",)), *parsed.overrides]
    if not _sets(words, "job.secrets_dir"):
        words.append(f"job.secrets_dir={SECRETS_DIR}")
    try:
        config = checked_config(words)
        if problems := [*_needs_upload(config), *_relative_presets(words)]:
            raise ConfigError(problems)
        nodes = [{"CPU": float(parsed.cpus), "GPU": float(parsed.gpus)}] * parsed.workers
        check_capacity(pools_in_use(config), nodes, None, extra=config.job.driver_cpus)
    except (ConfigError, ModelError, PlacementError) as error:
        print(f"deploy/kuberay.py: {error}", file=sys.stderr)
        return 2
    yaml.dump(manifest(parsed, config, words), sys.stdout, Dumper=_NoAliases, sort_keys=False, width=120)
    return 0


def _needs_upload(config: Config) -> Iterator[str]:
    """Yield a problem for each setting, file or module that only an upload would bring to the nodes."""
    for key, value in (("job.working_dir", config.job.working_dir), ("job.excludes", list(config.job.excludes))):
        if value not in (".", None, []):
            yield (
                f"{key} is {value!r}, but a manifest uploads nothing; put your files on the volume or into the image, "
                f"and remove {key}"
            )
    sources: Mapping[str, str | None] = {
        "data.source": config.data.source,
        "data.validation_source": config.data.validation_source,
        **evaluation_sets.sources(config),
        "model.path": config.model.path,
        "model.tokenizer": config.model.tokenizer,
        "critic.path": config.critic.path,
        "reward_model.path": config.reward_model.path,
    }
    for key, source in sources.items():
        if source not in (None, "arithmetic") and _is_relative_path(source):
            yield (
                f"{key} is {source!r}, but a manifest uploads nothing; put it on the volume or into the image, and set "
                "its absolute path"
            )
    for key, target in {"recipe.target": config.recipe.target, **targets_of(config)}.items():
        if _is_only_here(target.partition(":")[0]):
            yield (
                f"{key} is {target!r}, whose module is only in {Path.cwd()}, but a manifest uploads nothing; put it "
                "into the image"
            )


def _relative_presets(words: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each folder of presets with a relative path."""
    for folder in values_of(words, DIRECTORY_FLAGS):
        if not os.path.isabs(folder):
            yield (
                f"the folder of presets is {folder!r}, but a manifest uploads nothing; put it on the volume or into "
                "the image, and give its absolute path, which has to exist here, too"
            )


def _is_only_here(module: str) -> bool:
    """Return whether a module that was found is only in the working directory, which isn't on Python's path now."""
    top = module.partition(".")[0]
    imported = sys.modules.pop(top, None)  # else it is found where it was imported from
    try:
        return find_module_file(module) is None
    finally:
        if imported is not None:
            sys.modules[top] = imported


def _is_relative_path(source: str) -> bool:
    """Return whether a source is certainly a relative path, and no name on the Hub."""
    is_path = source.endswith(DATA_FILES) or source.startswith(("./", "../")) or os.path.exists(source)
    return is_path and not os.path.isabs(os.path.expanduser(source))


def manifest(parsed: argparse.Namespace, config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Return the manifest for a run."""
    document = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    document["metadata"]["name"] = parsed.name
    spec = document["spec"]
    spec["entrypoint"] = shlex.join(["python", "-P", "-m", "rlpack", "train", *words, JOINS])
    runtime_env: dict[str, Any] = {"env_vars": {**config.job.env_vars, STOP_WAIT: str(config.job.stop_timeout_s)}}
    if config.job.pip:
        runtime_env["pip"] = list(config.job.pip)
    spec["runtimeEnvYAML"] = yaml.safe_dump(runtime_env)
    if config.job.driver_cpus:  # the head has no cores for Ray, so the driver runs on a worker
        spec["entrypointNumCpus"] = config.job.driver_cpus
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    workers["replicas"] = workers["minReplicas"] = workers["maxReplicas"] = parsed.workers
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    for pod in pods:
        pod["containers"][0]["image"] = parsed.image
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        volumes["shared"]["persistentVolumeClaim"]["claimName"] = parsed.claim
        volumes["secrets"]["secret"] = {"secretName": parsed.secret, "optional": not config.job.secret_names}
    size = {"cpu": str(parsed.cpus), "memory": parsed.memory}
    if parsed.gpus:
        size["nvidia.com/gpu"] = str(parsed.gpus)
    pods[1]["containers"][0]["resources"] = {"requests": size, "limits": dict(size)}
    return document


class _NoAliases(yaml.SafeDumper):
    """Dumps repeated values in full, without YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _sets(words: Sequence[str], key: str) -> bool:
    return any(word.startswith(f"{key}=") for word in words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Generate a KubeRay RayJob for a run.")
    parser.add_argument(
        "--image", required=True, help="image built from docker/, in a registry that the nodes can reach"
    )
    parser.add_argument("--name", default="rlpack", help="name of the job (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="number of worker nodes (%(default)s)")
    parser.add_argument("--cpus", type=int, default=2, help="CPU cores per worker node (%(default)s)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per worker node (%(default)s)")
    parser.add_argument("--memory", default="8Gi", help="memory per worker node (%(default)s)")
    parser.add_argument("--claim", default="rlpack", help="volume claim that is mounted at /shared (%(default)s)")
    parser.add_argument("--secret", default="rlpack", help="secret that is mounted at job.secrets_dir (%(default)s)")
    parser.add_argument("overrides", nargs="+", metavar="-- key=value", help="overrides of `rlpack train`")
    return parser


if __name__ == "__main__":
    sys.exit(main())

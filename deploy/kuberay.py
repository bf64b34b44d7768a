"""Generate deploy/rayjob.yaml for an image, a size and a run: `python deploy/kuberay.py --image … -- overrides`.

python deploy/kuberay.py --image registry/rlpack:cuda --workers 2 --gpus 8 -- run_dir=/shared/mine | kubectl apply -f -

Values are inserted into the parsed manifest, never into its text, so they can't inject YAML. The config is checked as
in `rlpack submit`, and against the devices of the nodes.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlpack.cli.submit_checks import JOINS, checked_config
from rlpack.config.errors import ConfigError
from rlpack.config.roles import pools_in_use
from rlpack.config.schema import Config
from rlpack.config.sections.submission import STOP_WAIT
from rlpack.distributed.capacity import check_capacity
from rlpack.distributed.errors import PlacementError

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
        nodes = [{"CPU": float(parsed.cpus), "GPU": float(parsed.gpus)}] * parsed.workers
        check_capacity(pools_in_use(config), nodes, None, extra=config.job.driver_cpus)
    except (ConfigError, PlacementError) as error:
        print(f"deploy/kuberay.py: {error}", file=sys.stderr)
        return 2
    yaml.dump(manifest(parsed, config, words), sys.stdout, Dumper=_NoAliases, sort_keys=False, width=120)
    return 0


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

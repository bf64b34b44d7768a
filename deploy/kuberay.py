"""Write deploy/rayjob.yaml for an image, a size and a run: `python deploy/kuberay.py --image … -- overrides`.

python deploy/kuberay.py --image registry/rlpack:cuda --workers 2 --gpus 8 -- run_dir=/shared/mine | kubectl apply -f -

Values are put into the parsed manifest, never into its text, so none can break out of its place. The config is checked
as `rlpack submit` checks it, and against the devices that the nodes will have.
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
    """Print the manifest; 2 when the run or its place can't be."""
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
    yaml.dump(manifest(parsed, config, words), sys.stdout, Dumper=_Plain, sort_keys=False, width=120)
    return 0


def manifest(parsed: argparse.Namespace, config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Return the filled manifest."""
    made = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    made["metadata"]["name"] = parsed.name
    spec = made["spec"]
    spec["entrypoint"] = shlex.join(["python", "-m", "rlpack", "train", *words, JOINS])
    environment: dict[str, Any] = {"env_vars": {**config.job.env_vars, STOP_WAIT: str(config.job.stop_timeout_s)}}
    if config.job.pip:
        environment["pip"] = list(config.job.pip)
    spec["runtimeEnvYAML"] = yaml.safe_dump(environment)
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
    return made


class _Plain(yaml.SafeDumper):
    """Writes a value that occurs twice twice, instead of pointing back at it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _sets(words: Sequence[str], key: str) -> bool:
    return any(word.startswith(f"{key}=") for word in words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a KubeRay RayJob for a run.")
    parser.add_argument("--image", required=True, help="of docker/, where the nodes can pull it")
    parser.add_argument("--name", default="rlpack", help="of the job (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="nodes with ranks (%(default)s)")
    parser.add_argument("--cpus", type=int, default=2, help="CPU cores of each (%(default)s)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each (%(default)s)")
    parser.add_argument("--memory", default="8Gi", help="memory of each (%(default)s)")
    parser.add_argument("--claim", default="rlpack", help="volume claim that becomes /shared (%(default)s)")
    parser.add_argument(
        "--secret", default="rlpack", help="secret whose keys are files of job.secrets_dir (%(default)s)"
    )
    parser.add_argument("overrides", nargs="+", metavar="-- key=value", help="what `rlpack train` takes")
    return parser


if __name__ == "__main__":
    sys.exit(main())

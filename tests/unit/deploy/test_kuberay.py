"""The RayJob manifest against KubeRay's schema, the constraints and the run's config."""

import json
import re
import shlex
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from rlpack.config.compose import compose
from rlpack.config.sections.submission import STOP_WAIT

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())
MANIFEST = ROOT / "deploy" / "rayjob.yaml"
RUN = ("--image", "registry.example.org/rlpack:cuda")


@pytest.fixture(scope="module")
def kuberay():
    spec = spec_from_file_location("kuberay", ROOT / "deploy" / "kuberay.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def faults(manifest) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(SCHEMA).iter_errors(manifest)]


def pods(manifest):
    cluster = manifest["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def config_of(manifest):
    """Return the config of the run that the entrypoint starts."""
    words = shlex.split(manifest["spec"]["entrypoint"])
    assert words[:5] == ["python", "-P", "-m", "rlpack", "train"]
    return compose(words[5:])


def written(kuberay, capsys, *words):
    assert kuberay.main([*RUN, *words]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_the_schema_is_valid_and_rejects_unknown_fields():
    Draft202012Validator.check_schema(SCHEMA)
    for path, value in {"backoffLimit": "2", "entryPoint": "x", "submissionMode": "Http"}.items():
        manifest = yaml.safe_load(MANIFEST.read_text())
        manifest["spec"][path] = value
        assert len(faults(manifest)) == 1
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    assert faults(manifest) == [
        "$.spec.rayClusterSpec.headGroupSpec.rayStartParams['num-cpus']: 0 is not of type 'string'"
    ]


def test_the_manifest_follows_kuberays_schema():
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert faults(manifest) == []
    config = config_of(manifest)
    assert (config.placement.address, config.resume, config.run_dir) == ("auto", "auto", "/shared/rlpack")
    assert yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"] == {STOP_WAIT: str(config.job.stop_timeout_s)}


def test_the_manifests_ray_version_is_that_of_the_constraints():
    (version,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert yaml.safe_load(MANIFEST.read_text())["spec"]["rayClusterSpec"]["rayVersion"] == version


def test_a_token_is_required_no_pod_runs_as_root_and_every_mount_has_a_volume():
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert manifest["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    for pod in pods(manifest):
        assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_a_custom_run_is_written_with_its_image_size_secrets_and_environment(kuberay, capsys):
    manifest = written(
        *(kuberay, capsys, "--name", "mine", "--workers", "2", "--cpus", "16", "--gpus", "4", "--claim", "data"),
        *("--secret", "keys", "--", "run_dir=/shared/mine", "placement=eight_gpus", "job.secret_names=[HF_TOKEN]"),
        *("job.env_vars.NCCL_DEBUG=INFO", "job.pip=[math-verify]", "seed=7"),
    )
    assert faults(manifest) == []
    config = config_of(manifest)
    assert (config.seed, config.resume, config.job.secrets_dir) == (7, "auto", "/etc/rlpack-secrets")
    environment = yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])
    assert environment == {"env_vars": {"NCCL_DEBUG": "INFO", STOP_WAIT: "120"}, "pip": ["math-verify"]}
    for pod in pods(manifest):
        (container,) = pod["containers"]
        assert container["image"] == RUN[1]
        assert {"name": "secrets", "secret": {"secretName": "keys", "optional": False}} in pod["volumes"]
        assert any(mount["mountPath"] == config.job.secrets_dir for mount in container["volumeMounts"])
    (group,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "16", "memory": "8Gi", "nvidia.com/gpu": "4"}
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)


def test_cores_of_the_driver_are_reserved_if_it_gets_any(kuberay, capsys):
    manifest = written(kuberay, capsys, "--cpus", "3", "--", "run_dir=/shared/mine", "job.driver_cpus=1.5")
    assert faults(manifest) == []
    assert manifest["spec"]["entrypointNumCpus"] == 1.5
    assert "entrypointNumCpus" not in written(kuberay, capsys, "--", "run_dir=/shared/mine")["spec"]


def test_a_value_cannot_leave_its_place(kuberay, capsys):
    word = "data.prompt_column='a\"\\n: {b} $(id) # c'"
    manifest = written(kuberay, capsys, "--", "run_dir=/shared/mine", word)
    assert faults(manifest) == []
    assert config_of(manifest).data.prompt_column == compose([word]).data.prompt_column


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run_dir=mine",), "run_dir is mine, but a job's working directory is deleted"),
        (("run_dir=/shared/mine", "trainer.stepz=1"), "trainer.stepz is not a key; did you mean trainer.steps?"),
        (("run_dir=/shared/mine", "model.config.num_attention_heads=3"), "is not divisible by num_key_value_heads"),
        (("run_dir=/shared/mine", "placement.pools.main.ranks=5"), "ask for 5 CPU, the cluster has 4; lower"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_kubernetes_sees_it(kuberay, capsys, words, message):
    assert kuberay.main([*RUN, "--", *words]) == 2
    heard = capsys.readouterr()
    assert heard.out == ""
    assert message in heard.err


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ("data=jsonl", "data.source=rows.jsonl", "data.validation_source=/shared/rows.jsonl"),
            ["data.source is 'rows.jsonl', but a manifest uploads nothing; put it on the volume or into the image"],
        ),
        (
            ("data=jsonl", "data.source=owner/rows", "data.validation_source=./rows"),
            ["data.validation_source is './rows', but a manifest uploads nothing"],
        ),
        (("evaluation.sets.hard.source=hard.parquet",), ["evaluation.sets.hard.source is 'hard.parquet'"]),
        (("model=pretrained", "model.path=./mine"), ["model.path is './mine', but a manifest uploads nothing"]),
        (("model=pretrained", "model.path=inner"), ["model.path is 'inner', but a manifest uploads nothing"]),
        (
            ("data=jsonl", "data.source=inner", "data.validation_source=owner/rows"),
            ["data.source is 'inner', but a manifest uploads nothing; put it on the volume or into the image"],
        ),
        (
            ("reward.function=only_here:score", "roles.judge.target=only_here:Judge"),
            [
                "roles.judge.target is 'only_here:Judge', whose module is only in",
                "reward.function is 'only_here:score', whose module is only in",
            ],
        ),
        (("recipe.target=kuberay_recipe", "sft_warmup.steps=0"), ["recipe.target is 'kuberay_recipe', whose module"]),
        (
            ("--config-dir", "conf", "experiment=mine"),
            ["the folder of presets is 'conf', but a manifest"],
        ),
        (("job.working_dir=inner",), ["job.working_dir is 'inner', but a manifest uploads nothing; put your files"]),
        (("job.excludes=['*.bin']",), ["job.excludes is ['*.bin'], but a manifest uploads nothing; put your files"]),
    ],
)
def test_a_run_that_needs_an_upload_is_refused(kuberay, capsys, tmp_path, monkeypatch, words, messages):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_here.py").touch()
    (tmp_path / "kuberay_recipe.py").write_text("from rlpack.recipes.grpo_spec import SPEC\ndef main(config): ...\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 3\n")
    assert kuberay.main([*RUN, "--", "run_dir=/shared/mine", *words]) == 2
    heard = capsys.readouterr()
    assert heard.out == ""
    assert heard.err.startswith("deploy/kuberay.py: ")
    for message in messages:
        assert message in heard.err


def test_an_editable_package_of_the_working_directory_is_installed(kuberay, capsys, tmp_path, monkeypatch):
    class Editable:
        """Finds packages as setuptools' finder of editable installs does: without an entry on Python's path."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            file = tmp_path / "edited_here" / "__init__.py"
            return spec_from_file_location(name, file) if name == "edited_here" else None

    monkeypatch.chdir(tmp_path)
    (tmp_path / "edited_here").mkdir()
    (tmp_path / "edited_here" / "__init__.py").touch()
    (tmp_path / "edited_here" / "rewards.py").write_text("def score(completion): ...\n")
    words = ("--", "run_dir=/shared/mine", "reward.function=edited_here.rewards:score")
    assert kuberay.main([*RUN, *words]) == 2
    assert "reward.function is 'edited_here.rewards:score', whose module is only in" in capsys.readouterr().err
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    assert config_of(written(kuberay, capsys, *words)).reward.function == "edited_here.rewards:score"


def test_a_folder_named_as_the_generator_is_not_the_data(kuberay, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arithmetic").mkdir()
    assert config_of(written(kuberay, capsys, "--", "run_dir=/shared/mine")).data.source == "arithmetic"


def test_files_of_the_nodes_and_of_the_hub_need_no_upload(kuberay, capsys):
    words = ("data=jsonl", "data.source=/shared/a.jsonl", "data.validation_source=owner/rows", "job.working_dir=null")
    manifest = written(kuberay, capsys, "--", "run_dir=/shared/mine", "model=pretrained", "model.path=owner/m", *words)
    assert config_of(manifest).data.source == "/shared/a.jsonl"

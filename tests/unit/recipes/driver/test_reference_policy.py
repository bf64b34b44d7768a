"""The stored reference: verified when a run resumes, and rebuilt bit for bit where that is possible."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlpack.checkpoint.commit import new_checkpoint
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.schema import Config, SFTWarmup
from rlpack.recipes.driver.exports import store_reference_again
from rlpack.recipes.driver.reference_policy import (
    Rebuild,
    check_reference,
    rebuild_reference,
    reference_model,
    store_reference,
)
from tests.unit.recipes.driver.sessions import run_of, session_of, set_group

WITHOUT_WARMUP = Config(sft_warmup=SFTWarmup(steps=0))
WITH_WARMUP = Config(sft_warmup=SFTWarmup(steps=4))


def exports(weights: bytes, library: str = "5.0") -> Callable[[str], None]:
    def export(folder: str) -> None:
        Path(folder).mkdir()
        Path(folder, "model.safetensors").write_bytes(weights)
        Path(folder, "config.json").write_text(f'{{"transformers_version": "{library}"}}')

    return export


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_an_intact_reference_needs_no_rebuild(tmp_path: Path):
    hashes = store_reference(tmp_path, exports(b"policy"))
    assert check_reference(tmp_path, WITHOUT_WARMUP, hashes) is None


@pytest.mark.parametrize("file", ["model/model.safetensors", "model/config.json", "manifest.json", "COMMITTED"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_reference_is_rebuilt_loudly(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
):
    hashes = store_reference(tmp_path, exports(b"policy"))
    path = reference_model(tmp_path).parent / file
    flip(path) if damage == "flipped" else path.unlink()
    rebuild = check_reference(tmp_path, WITHOUT_WARMUP, hashes)
    assert rebuild == Rebuild(None, hashes)
    assert "can't be loaded" in caplog.text
    assert "rebuilding it from the new model of model.config" in caplog.text
    rebuild_reference(tmp_path, rebuild, exports(b"policy", library="5.1"))
    assert check_reference(tmp_path, WITHOUT_WARMUP, hashes) is None


def test_another_policy_than_that_of_the_run_is_not_taken_for_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    hashes = store_reference(tmp_path, exports(b"policy"))
    store_reference(tmp_path, exports(b"intact, but of another run"))
    assert check_reference(tmp_path, WITHOUT_WARMUP, hashes) == Rebuild(None, hashes)
    assert "isn't the policy that the run began with" in caplog.text


def test_a_weight_file_that_was_added_is_not_loaded(tmp_path: Path):
    hashes = store_reference(tmp_path, exports(b"policy"))
    (reference_model(tmp_path) / "model-2.safetensors").write_bytes(b"more weights")
    assert check_reference(tmp_path, WITHOUT_WARMUP, hashes) == Rebuild(None, hashes)


def test_a_base_model_that_has_changed_is_no_source_of_the_reference(tmp_path: Path):
    hashes = store_reference(tmp_path, exports(b"policy"))
    flip(reference_model(tmp_path) / "model.safetensors")
    damaged = (reference_model(tmp_path) / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"base model isn't the one that the run began with.*another run_dir"):
        rebuild_reference(tmp_path, Rebuild(None, hashes), exports(b"another policy"))
    assert check_reference(tmp_path, WITHOUT_WARMUP, hashes) is not None
    assert (reference_model(tmp_path) / "model.safetensors").read_bytes() == damaged
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["reference"]


def test_weights_that_are_intact_survive_a_rebuild_that_fails(tmp_path: Path):
    hashes = store_reference(tmp_path, exports(b"policy"))
    config = reference_model(tmp_path) / "config.json"
    original = config.read_text()
    config.write_text(original + " ")
    rebuild = check_reference(tmp_path, WITHOUT_WARMUP, hashes)
    assert rebuild is not None
    with pytest.raises(CheckpointError, match="can't be rebuilt"):
        rebuild_reference(tmp_path, rebuild, exports(b"another policy"))
    config.write_text(original)
    assert check_reference(tmp_path, WITHOUT_WARMUP, hashes) is None


def test_after_a_warmup_the_reference_is_rebuilt_from_its_last_checkpoint_or_refused(tmp_path: Path):
    hashes = store_reference(tmp_path, exports(b"policy"))
    with new_checkpoint(tmp_path / "checkpoints" / "sft_warmup", 4) as staging:
        (staging.path / "actor").write_bytes(b"shards")
        staging.commit({})
    flip(reference_model(tmp_path) / "model.safetensors")
    last = tmp_path / "checkpoints" / "sft_warmup" / "step-4"
    assert check_reference(tmp_path, WITH_WARMUP, hashes) == Rebuild(last, hashes)
    flip(last / "actor")
    with pytest.raises(CheckpointError, match=r"step-0 can't be loaded: .* nor can .*step-4, .*algorithm\.kl_coef=0"):
        check_reference(tmp_path, WITH_WARMUP, hashes)


def test_a_session_rebuilds_the_reference_from_the_warmups_policy(tmp_path: Path):
    session, actions = session_of(tmp_path), []
    set_group(
        session,
        "actor",
        load=lambda folder: actions.append(folder),
        export_reference=lambda folder: (actions.append("export"), exports(b"policy")(folder)),
    )
    hashes = store_reference(tmp_path, exports(b"policy"))
    store_reference_again(session, Rebuild(tmp_path / "step-4", hashes))
    store_reference_again(session, Rebuild(None, hashes))
    assert actions == [str(tmp_path / "step-4" / "actor"), "export", "export"]
    assert len(run_of(session).notes) == 2

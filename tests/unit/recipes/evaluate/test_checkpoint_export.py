import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlpack.batch.errors import DataError
from rlpack.checkpoint.commit import new_checkpoint
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.publish import MARKER
from rlpack.checkpoint.sharded import save_training_state
from rlpack.checkpoint.validity import STATE
from rlpack.config.schema import Actor, Config, Evaluation, EvaluationSet, Lora, Model, Rollout
from rlpack.data.tokenization import eos_id, pad_id
from rlpack.gloo import GLOO
from rlpack.models.loading import build_causal_lm
from rlpack.models.optimizers import build_optimizer
from rlpack.models.policy import Policy
from rlpack.packing import Batching
from rlpack.recipes.driver.splits import load_splits
from rlpack.recipes.evaluate.checkpoint_export import deletion_explained, export_checkpoint, exported_checkpoint
from rlpack.workers.build import set_trained_weights
from tests.builders import MODEL, tiny_config
from tests.distributed.processes import on_ranks
from tests.memory_rise import MemoryRise
from tests.unit.recipes.driver.sessions import DATA
from tests.whole_weights import full_state_dict


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def checkpoint_of(folder: Path, config: Config, prompts_fingerprint: str | None = None) -> tuple[Path, Policy]:
    """Save a policy with random weights as a run does; no process group is left."""
    tokenizer, prompts, held_out = load_splits(config)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": eos_id(tokenizer), "pad_token_id": pad_id(tokenizer)}
    lm = build_causal_lm(config.model, **ids, seed=config.seed, attention_name="sdpa")
    set_trained_weights(lm, config.actor, seed=config.seed)
    policy = Policy(lm)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    state = dict.fromkeys(("reference", "records")) | {
        "progress": {"phase": "train", "step": 3},
        "config": config.model_dump(mode="json"),
        "prompts": prompts_fingerprint or prompts.fingerprint,
        "held_out": held_out.fingerprint,
    }
    with new_checkpoint(folder, 3) as staging:
        save_training_state(policy, build_optimizer(policy, config.actor.optimizer), staging.path / "actor")
        staging.commit(state)
    dist.destroy_process_group()
    return folder / "step-3", policy


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("lora", [Lora(), Lora(rank=2, alpha=8.0)], ids=["whole", "lora"])
def test_the_exported_folder_has_the_policys_merged_weights_and_its_tokenizer(tmp_path: Path, lora: Lora) -> None:
    config = tiny_config(data=DATA, actor=Actor(lora=lora, isolation_check=False))
    checkpoint, policy = checkpoint_of(tmp_path / "checkpoints", config)
    export_checkpoint(checkpoint, tmp_path / "model")
    exported, expected = load_file(tmp_path / "model" / "model.safetensors"), full_state_dict(policy)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in expected.items())
    row = torch.tensor([[3, 4, 5, 6]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    policy.eval()
    torch.testing.assert_close(
        model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0],
        policy.probe_wrapped_model(row)[0, 1:],
        atol=1e-4,
        rtol=1e-4,
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == load_splits(config)[0].get_vocab()


@pytest.mark.usefixtures("one_rank")
def test_the_exported_model_ends_its_responses_where_the_runs_end(tmp_path: Path) -> None:
    config = tiny_config(data=DATA, rollout=Rollout(stop_token_ids=(5,)))
    checkpoint, _ = checkpoint_of(tmp_path / "checkpoints", config)
    export_checkpoint(checkpoint, tmp_path / "model")
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [1, 5]


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_cannot_run_packed_rows_is_exported(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    model = Model(config={"model_type": "gpt_neo", **sizes})
    config = tiny_config(data=DATA, model=model, batching=Batching(mode="dynamic"))
    checkpoint, policy = checkpoint_of(tmp_path / "checkpoints", config)
    export_checkpoint(checkpoint, tmp_path / "model")
    exported, expected = load_file(tmp_path / "model" / "model.safetensors"), full_state_dict(policy)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in expected.items())


@pytest.mark.usefixtures("one_rank")
def test_the_tokenizer_has_the_characters_of_evaluation_sets(tmp_path: Path) -> None:
    (tmp_path / "hard.jsonl").write_text('{"prompt": "six minus two=", "answer": "4", "demonstration": "4"}\n')
    sets = Evaluation(sets={"hard": EvaluationSet(source=str(tmp_path / "hard.jsonl"))})
    config = tiny_config(data=DATA, evaluation=sets, actor=Actor(isolation_check=False))
    checkpoint, _ = checkpoint_of(tmp_path / "checkpoints", config)
    export_checkpoint(checkpoint, tmp_path / "model")
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab()
    assert vocabulary.keys() >= set("six minus two=")


@pytest.mark.usefixtures("one_rank")
def test_the_folder_exists_inside_the_block_alone_and_replaces_what_a_kill_left(tmp_path: Path) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "checkpoints", tiny_config(data=DATA))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "half").touch()
    with exported_checkpoint(checkpoint, tmp_path / "model"):
        assert (tmp_path / "model" / "model.safetensors").is_file()
        assert not (tmp_path / "model" / "half").exists()
    assert not (tmp_path / "model").exists()


@pytest.mark.usefixtures("one_rank")
def test_a_tokenizer_of_prompts_that_changed_is_refused(tmp_path: Path) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "checkpoints", tiny_config(data=DATA), "another")
    with pytest.raises(DataError, match="has other rows than when the checkpoint"):
        export_checkpoint(checkpoint, tmp_path / "model")


@pytest.mark.usefixtures("one_rank")
def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    checkpoint, policy = checkpoint_of(tmp_path / "checkpoints", tiny_config(data=DATA))
    wider = tiny_config(data=DATA, model=Model(config=MODEL | {"hidden_size": 64}))
    del policy
    other = tmp_path / "other"
    with new_checkpoint(other, 3) as staging:
        (checkpoint / "actor").rename(staging.path / "actor")
        state = dict.fromkeys(("reference", "records")) | {"progress": {"phase": "train", "step": 3}}
        _, prompts, held_out = load_splits(wider)
        prints = {"prompts": prompts.fingerprint, "held_out": held_out.fingerprint}
        staging.commit(state | prints | {"config": wider.model_dump(mode="json")})
    with pytest.raises(CheckpointError, match="does not fit this model"):
        export_checkpoint(other / "step-3", tmp_path / "model")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("deleted", ["before", "during"])
def test_a_checkpoint_that_its_run_deletes_during_an_evaluation_is_an_error_that_says_so(
    tmp_path: Path, deleted: str
) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "checkpoints", tiny_config(data=DATA))
    shutil.rmtree(checkpoint if deleted == "before" else checkpoint / "actor")
    (checkpoint / MARKER).unlink(missing_ok=True)
    with (
        pytest.raises(
            CheckpointError, match=r"the run has since deleted .*/step-3, because.*raise the run's checkpoint\.k"
        ),
        exported_checkpoint(checkpoint, tmp_path / "model"),
    ):
        pass
    assert not (tmp_path / "model").exists()
    with pytest.raises(CheckpointError, match="has since deleted"), deletion_explained(checkpoint):
        (checkpoint / "actor" / "weights").read_bytes()


@pytest.mark.usefixtures("one_rank")
def test_a_damaged_checkpoint_is_not_called_deleted(tmp_path: Path) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "checkpoints", tiny_config(data=DATA))
    (checkpoint / STATE).write_text("{}")
    with (
        pytest.raises(CheckpointError, match=r"step-3 can't be loaded: state\.json"),
        exported_checkpoint(checkpoint, tmp_path / "model"),
    ):
        pass


def export_memory(mesh: object, rank: int, checkpoint: str, small: str, folder: str) -> int:
    """Return how far memory rises while a checkpoint is exported, after that of a small model."""
    memory = MemoryRise()
    export_checkpoint(Path(small), Path(folder) / "small")
    memory.start()
    export_checkpoint(Path(checkpoint), Path(folder) / "model")
    return memory.num_bytes


def test_an_export_holds_the_model_once(tmp_path: Path) -> None:
    shape, folders, size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}, [], 0
    for name, changes in (("large", shape), ("small", {})):
        dist.init_process_group(GLOO, init_method=f"file://{tmp_path / name}-meeting", rank=0, world_size=1)
        config = tiny_config(data=DATA, model=Model(config=MODEL | changes))
        checkpoint, policy = checkpoint_of(tmp_path / name, config)
        folders.append(str(checkpoint))
        size = max(size, sum(weight.nbytes for weight in policy.parameters()))
    assert size > 100 * 2**20
    (rise,) = on_ranks(tmp_path, 1, export_memory, *folders, str(tmp_path))
    assert 0.9 * size < rise < 1.5 * size  # with a copy of all weights, more than twice

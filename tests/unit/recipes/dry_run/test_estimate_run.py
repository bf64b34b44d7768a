"""Dry runs: what they print and return, and that they read no weights and start nothing."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlpack.config.schema import (
    Actor,
    Algorithm,
    Checkpoint,
    Config,
    Data,
    Model,
    Placement,
    Pool,
    Rollout,
    SFTWarmup,
    Trainer,
)
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.config.sections.parallelism import Parallel
from rlpack.config.sections.role_batching import ForwardBatching
from rlpack.config.sections.value_models import Critic, RewardModel
from rlpack.data.tokenization import character_tokenizer
from rlpack.models.errors import ModelError
from rlpack.models.memory_simulation import ModelMemory
from rlpack.packing import Batching
from rlpack.recipes.dry_run.changes import smaller, with_value
from rlpack.recipes.dry_run.estimate_run import Estimator, MemoryLimits, main, open_estimator, run_line
from rlpack.recipes.dry_run.memory_report import change_lines, verdict
from rlpack.recipes.dry_run.run_memory import PoolMemory, RoleMemory, RunMemory, store_bytes
from rlpack.recipes.dry_run.whole_models import bytes_at_start
from tests.builders import tiny_config, tiny_tokenizer

DATA = Data(generator={"train_size": 32, "validation_size": 4}, completion_column="demonstration", max_prompt_tokens=64)
TRAINER = Trainer(prompts_per_step=8, group_size=4, mini_batch_size=16)
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
GB = 1e9


def config(recipe: str = "sft", **sections: Any) -> Config:
    actor = Actor(isolation_check=False)
    sizes = {"data": DATA, "trainer": TRAINER, "actor": actor, "batching": Batching(max_tokens=256)}
    sizes |= {"rollout": Rollout(max_new_tokens=32), "algorithm": Algorithm(kl_coef=0.1)}
    return tiny_config(recipe, **(sizes | sections))


def test_the_length_of_a_run_in_passes_is_shown_in_steps(capsys: pytest.CaptureFixture[str]):
    passes = TRAINER.model_copy(update={"data_epochs": 3})  # 32 prompts, 8 in a step
    assert main(config("ppo", critic=Critic(), trainer=passes), None, print)
    assert "run: 12 steps of 8 prompts, 3 passes over 32 prompts\n" in capsys.readouterr().out


@pytest.mark.parametrize(("recipe", "words"), [("sft", "2 passes over"), ("dapo", "at least 2 passes over")])
def test_passes_are_a_bound_only_where_prompts_may_be_discarded(recipe: str, words: str):
    given = tiny_config(recipe, trainer=Trainer(steps=20, prompts_per_step=3))
    assert run_line(given, 30).removeprefix("run: 20 steps of 3 prompts, ").startswith(words)


def test_the_longest_demonstration_of_all_counts_not_that_of_the_first_batch(capsys: pytest.CaptureFixture[str]):
    given = config(trainer=Trainer(prompts_per_step=1), placement=gpus(1, address="auto"))
    estimator = open_estimator(given, 80)
    every = estimator.prompts.demonstrations(np.arange(32), estimator.tokenizer)["input_ids"].lengths
    batch = estimator.batch(given)
    assert batch.lengths.max() < batch.longest == every.max()
    assert estimator.plans(given)["actor"].microbatch.slots == batch.longest
    # Training refuses a budget under the longest row.
    assert estimator.can_run(with_value(given, "batching.max_tokens", batch.longest))
    assert not estimator.can_run(with_value(given, "batching.max_tokens", batch.longest - 1))
    assert not estimator.can_run(with_value(given, "batching", Batching(max_tokens=batch.longest, pad_to_multiple=64)))
    assert main(given, 80, print)
    assert f"the longest of all has {batch.longest} tokens" in capsys.readouterr().out


def test_the_actors_microbatch_may_be_that_of_the_supervised_warm_up(capsys: pytest.CaptureFixture[str]):
    data = DATA.model_copy(update={"max_prompt_tokens": 40})
    small = {"trainer": Trainer(prompts_per_step=1, group_size=2), "rollout": Rollout(max_new_tokens=1), "data": data}
    small |= {"placement": gpus(1, address="auto"), "critic": Critic(), "batching": Batching(max_tokens=512)}
    warm_up = SFTWarmup(steps=2, batch_size=32)
    plans, several = {}, {}
    for name, steps in (("without", SFTWarmup()), ("with", warm_up), ("small", SFTWarmup(steps=2, batch_size=1))):
        given = config("ppo", **small, sft_warmup=steps)
        estimator = open_estimator(given, 80)
        plans[name] = {role: plan.microbatch.slots for role, plan in estimator.plans(given).items()}
        several[name] = {role: plan.several for role, plan in estimator.plans(given).items()}
        if steps.steps:
            assert not estimator.can_run(with_value(given, "batching.max_tokens", batch_of(estimator, given) - 1))
    assert plans["without"]["actor"] < plans["small"]["actor"] < plans["with"]["actor"] == 512
    assert several["with"]["actor"]
    assert not several["without"]["actor"]
    for role in ("critic", "reference"):
        assert plans["with"][role] == plans["without"][role]
        assert several["with"][role] == several["without"][role]
    main(given, 80, print)
    assert "warm-up: 1 sequence of" in capsys.readouterr().out


def batch_of(estimator: Estimator, given: Config) -> int:
    """Return the tokens of the longest demonstration."""
    return estimator.batch(given).longest_demonstration


def test_virtual_stages_are_shown_with_the_layout(capsys: pytest.CaptureFixture[str]):
    actor = Actor(isolation_check=False, parallel=Parallel(pp=2, vpp=2))
    model = Model(config=TINY | {"model_type": "qwen3", "num_key_value_heads": 2, "num_hidden_layers": 4})
    assert main(config(actor=actor, model=model), None, print)
    out = capsys.readouterr().out
    assert "actor: 2 ranks (pp 2, vpp 2); " in out
    # Hidden states and gradients that stages send each other are neither weights nor their gradients.
    weights, gradients = map(float, re.findall(r"^(?:weights|gradients) +(\S+) kB", out, re.MULTILINE))
    assert gradients == pytest.approx(weights, rel=0.01)


def gpus(count: int, **options: Any) -> Placement:
    return Placement(pools={"main": Pool(ranks=count, gpus_per_rank=1.0)}, **options)


def test_every_role_with_a_model_is_counted_and_nothing_is_left(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(config("ppo", critic=Critic()), None, print)
    shown = capsys.readouterr().out
    (header,) = [line for line in shown.splitlines() if line.split() == ["actor", "critic", "reference"]]
    assert header
    assert "8 prompts" not in shown.replace("steps of 8 prompts", "")  # a batch is counted in sequences
    assert re.search(r"batch: 32 sequences of \d+ to \d+ tokens", shown)
    assert re.search(r"^actor: 2 ranks \(dp_shard 2\); 2 optimizer steps of \d+ microbatch", shown, re.MULTILINE)
    assert "engine: " in shown
    assert shown.splitlines()[-1] == "it fits"
    assert not dist.is_initialized()
    assert not ray.is_initialized()
    assert list(tmp_path.iterdir()) == []


def test_70_billion_parameters_on_64_gpus_take_a_64th_each():
    actor = Actor(
        isolation_check=False, precision="bf16", gradient_checkpointing="full", parallel=Parallel(tp=8, dp_shard=8)
    )
    large = config(model=Model(config=LLAMA_70B), actor=actor, placement=gpus(64), batching=Batching(max_tokens=4096))
    estimator = open_estimator(large, 80)
    memory = estimator.memory(large)
    (pool,) = memory.pools
    model = pool.roles["actor"].model
    layer = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    vocabulary = estimator.model.config.vocab_size
    numbers = 80 * layer + 2 * vocabulary * 8192
    assert model.weights == pytest.approx(4 * numbers / 64, rel=0.01)
    assert model.gradients == pytest.approx(4 * numbers / 64, rel=0.01)
    assert model.optimizer == pytest.approx(8 * numbers / 64, rel=0.01)
    # Gathered at once, in bf16: a layer, its copy before it is cut up, and the next one; each over the 8 ranks of tp.
    assert 2 * layer / 8 < model.most["gathered"] < 4 * 2 * layer / 8
    # The inputs of 80 layers in bf16, of this rank's part of the tokens.
    tokens = estimator.plans(large)["actor"].microbatch.slots
    assert model.most["activations"] > 80 * 2 * 8192 * tokens / 8
    assert pool.roles["actor"].peak < 25 * GB
    assert pool.peak < 25 * GB
    assert memory.excess <= 0


def test_what_does_not_fit_names_keys_that_help(capsys: pytest.CaptureFixture[str]):
    shape = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    large = config(
        model=Model(config=shape),
        placement=gpus(2, address="auto"),
        batching=Batching(max_tokens=8192),
        trainer=Trainer(prompts_per_step=400),
    )
    assert main(large, 80, print)
    capsys.readouterr()
    assert not main(large, 2.2, print)
    shown = capsys.readouterr().out
    assert re.search(r"it does not fit: pool main needs [\d.]+ GB of each GPU, which has 2.2 GB", shown)
    assert "each of these changes makes it fit:" in shown
    assert re.search(r"^  actor.gradient_checkpointing=full  \([\d.]+ GB of a GPU\)$", shown, re.MULTILINE)
    assert "batching.max_tokens=4096" in shown


def test_if_no_change_is_enough_the_best_ones_are_named():
    def run(size: int) -> RunMemory:
        kept = ModelMemory(size, 0, 0, {"weights": size}, {"weights": size}, 0, 0)
        pool = PoolMemory("main", 2, gpus_per_rank=1.0, limit=2 * 10**9, roles={"actor": RoleMemory(kept)}, engine=None)
        return RunMemory((pool,), store=0, host_limit=None)

    assert verdict(run(5 * 10**9)) == "it does not fit: pool main needs 6 GB of each GPU, which has 2 GB"
    changes = [("actor.precision=bf16", run(4 * 10**9)), ("a.b=1", run(3 * 10**9))]
    assert list(change_lines(run(5 * 10**9), changes)) == [
        "none of these changes makes it fit by itself:",
        "  a.b=1  (4 GB of a GPU)",
        "  actor.precision=bf16  (5 GB of a GPU)",
    ]


def test_ranks_without_rows_and_the_gpus_of_an_engine_are_counted(capsys: pytest.CaptureFixture[str]):
    pools = {"main": Pool(ranks=4, gpus_per_rank=1.0), "engines": Pool(ranks=3, gpus_per_rank=2.0)}
    placement = Placement(pools=pools, roles={"rollout": "engines"})
    trainer = Trainer(prompts_per_step=8, group_size=1, mini_batch_size=2)
    main(
        config("grpo", placement=placement, trainer=trainer, rollout=Rollout(engine="vllm", max_new_tokens=8)),
        80,
        print,
    )
    shown = capsys.readouterr().out
    assert "1 microbatch per rank (8 of 16 in all are empty: 2 rows for 4 data ranks), " in shown
    assert "pool main: 4 ranks, a GPU each; on the rank that takes most" in shown
    assert "pool engines: 3 ranks, 2 GPUs each, 6 in all; on the GPU that takes most" in shown
    assert shown.count("each rank: ") == shown.count("each GPU: ") == 1


def test_only_keys_of_the_engine_are_tried_where_its_share_alone_is_too_small(capsys: pytest.CaptureFixture[str]):
    rollout = Rollout(engine="vllm", max_new_tokens=8, vllm={"gpu_memory_utilization": 1e-6}, dtype="fp32")
    assert not main(config("grpo", placement=gpus(2), rollout=rollout), 80, print)
    found = capsys.readouterr().out.partition("each of these changes makes it fit:\n")[2]
    keys = [line.split("=")[0].strip() for line in found.splitlines()]
    assert keys == ["rollout.vllm.gpu_memory_utilization"]  # no key of the actor


def test_ranks_on_cpus_share_the_memory_of_the_machine(capsys: pytest.CaptureFixture[str]):
    assert not main(config(), 0.5, print)
    assert "all ranks together need" in capsys.readouterr().out
    assert main(config(), 2, print)
    assert MemoryLimits.of(config(placement=gpus(4)), None).assumed
    assert MemoryLimits.of(config(), None).host is not None


def test_no_weight_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shape = AutoConfig.for_model(**LLAMA_70B, vocab_size=128)
    shape.architectures = ["LlamaForCausalLM"]
    shape.num_hidden_layers = 4
    shape.save_pretrained(tmp_path)
    header, end = {}, 0
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(shape).state_dict()
    for name, weight in weights.items():
        size = 4 * weight.numel()
        header[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:  # 14 GB, of which only the header is on the disk
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    stored = config(model=Model(path=str(tmp_path), tokenizer=_tokenizer(tmp_path)), placement=gpus(2, address="auto"))
    before = path.stat().st_blocks
    assert not main(stored, 20, print)
    assert "start: the whole model" not in capsys.readouterr().out
    assert path.stat().st_blocks == before


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize("why", ["", "custom code", "fused", "classifier", "fused classifier"])
def test_a_model_that_ranks_load_whole_counts_as_they_start(why: str, tmp_path: Path):
    """What ranks load whole, they say themselves; the bytes are those of the weights in fp32."""
    tokenizer = tiny_tokenizer()
    is_classifier = "classifier" in why
    kind = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    labels = {"num_labels": 1} if is_classifier else {}
    model = kind.from_config(AutoConfig.for_model("llama", **TINY, **labels, vocab_size=len(tokenizer)))
    model.save_pretrained(tmp_path)
    if "fused" in why:
        text = json.loads((tmp_path / "config.json").read_text()) | {"fusion_config": {}}
        (tmp_path / "config.json").write_text(json.dumps(text))
    given = {"trust_remote_code": True, "revision": "0" * 40} if why == "custom code" else {}
    section = Model(path=str(tmp_path), **given)
    stored = config(model=section, reward_model=RewardModel(path=str(tmp_path)))
    expected = 4 * sum(weight.numel() for weight in model.parameters()) if why not in ("", "classifier") else 0
    if is_classifier:
        assert bytes_at_start(stored, "reward_model", tokenizer) == expected - 4 * 32 * bool(
            expected
        )  # without its head
        return
    for role in ("actor", "critic", "reference"):
        assert bytes_at_start(stored, role, tokenizer) == expected


def test_a_small_new_model_and_one_that_reads_values_while_it_is_built_count_as_ranks_start():
    tokenizer, sizes = tiny_tokenizer(), TINY | {"model_type": "llama"}
    small, large = (config(model=Model(config=sizes | {"hidden_size": size})) for size in (32, 2048))
    assert bytes_at_start(small, "actor", tokenizer) > 0
    assert bytes_at_start(large, "actor", tokenizer) == 0
    model = {"model_type": "modernbert-decoder", "hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 4096}
    model |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    model |= {"num_attention_heads": 16}
    assert bytes_at_start(config(model=Model(config=model)), "actor", tokenizer) > 128 * 2**20


def _tokenizer(folder: Path) -> str:
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    character_tokenizer(alphabet).save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def test_a_problem_that_a_run_would_refuse_is_refused():
    wrong = config(actor=Actor(isolation_check=False, lora=Lora(rank=2, targets=("*.nothing",))))
    with pytest.raises(ModelError, match=r"actor\.lora\.targets"):
        main(wrong, None, print)


def test_log_probs_with_a_larger_budget_count_if_they_take_more_than_the_update():
    def peak(**forward: int) -> tuple[int, int]:
        actor = Actor(isolation_check=False, logprob_chunk=16, forward_batching=ForwardBatching(**forward))
        # All activations but one layer's are recomputed, so a pass without gradients over more rows may hold more.
        given = config("grpo", actor=actor.model_copy(update={"gradient_checkpointing": "full"}))
        (pool,) = open_estimator(given, None).memory(given).pools
        return pool.roles["actor"].peak, pool.roles["actor"].kept

    (unset, kept), (same, _), (larger, kept_too) = peak(), peak(max_tokens=256), peak(max_tokens=4096)
    assert unset == same
    assert larger > unset
    assert kept == kept_too


def test_ranks_that_divide_experts_gather_fewer_weights():
    shape = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    models = []
    for ep in (1, 2):
        actor = Actor(isolation_check=False, parallel=Parallel(ep=ep), gradient_checkpointing="selective")
        given = config(model=Model(config=shape), actor=actor, placement=gpus(2))
        (pool,) = open_estimator(given, 80).memory(given).pools
        models.append(pool.roles["actor"].model)
    assert models[0].weights == pytest.approx(models[1].weights, rel=0.01)
    assert models[1].peak > models[1].kept


@pytest.mark.parametrize("max_tokens", [91, 93])
def test_experts_may_get_tokens_that_their_ranks_do_not_divide(max_tokens: int):
    shape = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    actor, trainer = Actor(isolation_check=False, parallel=Parallel(ep=4)), Trainer(prompts_per_step=16)
    sections = {"model": Model(config=shape), "actor": actor, "trainer": trainer, "placement": gpus(4)}
    given = config(**sections, batching=Batching(max_tokens=max_tokens))
    estimator = open_estimator(given, 80)
    assert estimator.plans(given)["actor"].microbatch.slots == max_tokens
    (pool,) = estimator.memory(given).pools
    assert pool.roles["actor"].model.peak > 0


def test_a_row_above_the_budget_counts_whole_if_it_runs_alone():
    slots = {}
    for overlong in ("own_microbatch", "truncate"):
        given = config(batching=Batching(max_tokens=32, overlong=overlong), placement=gpus(2))
        estimator = open_estimator(given, 80)
        slots[overlong] = estimator.plans(given)["actor"].microbatch.slots
    longest = estimator.batch(given).longest
    assert longest > 32
    assert slots == {"own_microbatch": longest, "truncate": 32}


def test_changes_that_a_run_would_refuse_are_not_proposed(capsys: pytest.CaptureFixture[str]):
    actor = Actor(isolation_check=False, compile=True)
    assert not main(config(actor=actor, placement=gpus(8)), 1e-4, print)
    shown = capsys.readouterr().out
    assert "actor.gradient_checkpointing=full" in shown
    assert "selective" not in shown
    assert "actor.lora.rank" not in shown
    assert "actor.parallel.tp" not in shown


def test_changes_set_keys_and_keep_the_rest():
    before = config(placement=gpus(8), actor=Actor(parallel=Parallel(dp_replicate=2)))
    changes = dict[str, list[Any]]()
    for key, value in smaller(before, longest=100):
        changes.setdefault(key, []).append(value)
    assert changes == {
        "actor.gradient_checkpointing": ["selective", "full"],
        "batching.max_tokens": [128],
        "actor.precision": ["bf16"],
        "actor.offload": ["optimizer", "parameters"],
        "actor.parallel.dp_replicate": [1],
        "actor.parallel.tp": [2, 4],
        "actor.optimizer.name": ["adamw_8bit"],
        "actor.lora.rank": [16],
    }
    changed = with_value(before, "batching.max_tokens", 128)
    assert changed.batching == Batching(max_tokens=128)
    assert changed.model_copy(update={"batching": before.batching}) == before


def test_offloaded_state_counts_as_host_memory():
    sizes = {}
    for offload in ("none", "optimizer", "parameters"):
        actor = Actor(isolation_check=False, offload=offload, optimizer=Optimizer())
        given = config(actor=actor, placement=gpus(2))
        (pool,) = open_estimator(given, 80).memory(given).pools
        role = pool.roles["actor"]
        sizes[offload] = role.kept, role.host
        total = role.model.kept
        assert sum(sizes[offload]) == total
    assert sizes["none"][1] == 0
    assert sizes["optimizer"][1] == role.model.optimizer == 2 * role.model.gradients
    assert sizes["parameters"][0] == 0


def test_the_copy_for_asynchronous_checkpoints_counts():
    (plain,), (copied,) = (
        open_estimator(given, None).memory(given).pools
        for given in (config(checkpoint=Checkpoint(asynchronous=is_copied)) for is_copied in (False, True))
    )
    model = plain.roles["actor"].model
    assert copied.peak - plain.peak == model.weights + model.optimizer
    after = [replace(pool, gpus_per_rank=1.0).host_after_start for pool in (plain, copied)]
    assert after[1] - after[0] == model.weights + model.optimizer


@pytest.mark.parametrize(
    ("publish", "lead", "window", "batches"), [("drain", 0, 1, 1), ("drain", 1, 1, 2), ("in_flight", 4, 3, 7)]
)
def test_the_store_holds_the_batches_that_are_drawn_ahead(publish: Any, lead: int, window: int, batches: int):
    trainer = Trainer.model_validate({"lead": lead, "late_groups": {"window": window}})
    given = config("grpo", trainer=trainer, rollout=Rollout(publish=publish, engine="vllm"))
    one = store_bytes(config("grpo"), 1000, None)
    assert store_bytes(given, 1000, None) == batches * one


def test_an_engine_of_transformers_needs_no_attention_heads():
    mamba = {"model_type": "mamba", "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    given = config("grpo", model=Model(config=mamba), batching=Batching(mode="dynamic", max_tokens=256))
    engine = open_estimator(given, 80).memory(given).pools[0].engine
    assert engine is not None
    assert engine.weights > 0

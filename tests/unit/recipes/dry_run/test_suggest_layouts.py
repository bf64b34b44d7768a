"""Suggestions: what is tried, in which order, and that the overrides that are printed fit."""

import math
import re
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlpack.config.compose import compose
from rlpack.config.rules import broken_rules
from rlpack.config.schema import Actor, Config, Data, Model, Placement, Pool, Rollout, Trainer
from rlpack.config.sections.parallelism import Parallel
from rlpack.config.sections.value_models import Critic, RewardModel
from rlpack.models.errors import ModelError
from rlpack.packing import Batching
from rlpack.recipes.dry_run import layout_search
from rlpack.recipes.dry_run.changes import with_value
from rlpack.recipes.dry_run.estimate_run import Estimator, MemoryLimits, open_estimator
from rlpack.recipes.dry_run.layout_candidates import Candidate, candidates
from rlpack.recipes.dry_run.layout_search import LayoutSearch
from rlpack.recipes.dry_run.run_memory import RunMemory
from rlpack.recipes.dry_run.suggest_layouts import main
from tests.builders import MODEL, tiny_config

DATA = Data(generator={"train_size": 32, "validation_size": 4}, completion_column="demonstration", max_prompt_tokens=64)


def config(ranks: int = 4, **sections: Any) -> Config:
    placement = Placement(pools={"main": Pool(ranks=ranks, gpus_per_rank=1.0)}, address="auto")
    trainer, actor = Trainer(prompts_per_step=64), Actor(isolation_check=False)
    batching = Batching(max_tokens=512)
    return tiny_config(
        "sft",
        **({"data": DATA, "trainer": trainer, "actor": actor, "batching": batching, "placement": placement} | sections),
    )


def test_layouts_divide_ranks_and_model_and_budgets_hold_the_longest_row():
    given = config()
    estimator = open_estimator(given, 80)
    found = list(candidates(given, estimator, tflops=100.0, overhead_ms=1.0))
    # Replicas, cp, tp, pp: products that divide 4 ranks. Two key and value heads, two layers: no tp or pp of 4, and no
    # virtual stages.
    layouts = {each.layout for each in found}
    sizes = (1, 2, 4)
    expected = {(*each, 1, 1) for each in product(sizes, sizes, (1, 2), (1, 2)) if 4 % prod(each) == 0}
    assert layouts == expected
    assert {each.values.get("actor.parallel.cp_method") for each in found} == {None, "ulysses"}
    longest = estimator.batch(given).longest
    budgets = {each.values["batching.max_tokens"] for each in found}
    assert min(budgets) >= longest / 4
    assert max(budgets) <= 2048
    seconds = {
        each.values["actor.gradient_checkpointing"]: each.seconds for each in found if each.layout == (1, 1, 1, 1, 1, 1)
    }
    assert seconds["full"] > seconds["none"] == seconds["selective"]


def test_the_fastest_that_fit_are_printed_with_overrides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    tried = []
    memory = Estimator.memory

    def noted(self: Estimator, variant: Config) -> Any:
        tried.append(variant)
        return memory(self, variant)

    monkeypatch.setattr(Estimator, "memory", noted)
    monkeypatch.setattr(layout_search, "_MOST", 2)
    assert main(config(2), 80, None, 10.0, print)
    assert len(tried) <= 6  # the first ones fit, and those of their kind with less memory
    shown = capsys.readouterr().out
    assert "knows neither network nor kernels" in shown
    lines = re.findall(r"^(\d): (.*)$", shown, re.MULTILINE)
    assert [number for number, _ in lines] == ["1", "2"]
    for _, overrides in lines:
        pasted = compose([*overrides.split(), "placement.pools.main.ranks=2", "batching.overlong=truncate"])
        assert pasted.batching.max_tokens is not None
    times = [float(row.split()[1]) for row in shown.splitlines() if re.match(r"\d  +[\d.]", row)]
    assert times == sorted(times)


def test_without_enough_memory_there_is_no_suggestion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layout_search, "_TRIES", 3)
    assert not main(config(2), 0.5, None, 10.0, print)
    assert "none of those that were tried fits; use more ranks" in capsys.readouterr().out


def test_experts_are_divided_and_heads_that_cp_does_not_divide_use_gathered_keys():
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    given = config(model=Model(config={"model_type": "qwen3_moe"} | sizes | experts))
    found = list(candidates(given, open_estimator(given, 80), tflops=100.0, overhead_ms=1.0))
    assert {each.layout[4] for each in found} == {1, 2, 4}
    assert all(4 // each.layout[0] // each.layout[2] // each.layout[3] % each.layout[4] == 0 for each in found)
    assert {each.values["actor.parallel.cp_method"] for each in found if each.layout[1] > 1} == {"all_gather"}


def test_virtual_stages_of_the_configuration_are_not_those_of_every_layout():
    deeper = Model(config=MODEL | {"num_hidden_layers": 4})
    staged = Actor(isolation_check=False, parallel=Parallel(pp=2, vpp=2))
    found = []
    for given in (config(model=deeper), config(model=deeper, actor=staged)):
        found.append(list(candidates(given, open_estimator(given, 80), tflops=100.0, overhead_ms=1.0)))
        assert all(each.config.actor.parallel.vpp == each.layout[-1] for each in found[-1])
    assert {each.layout for each in found[0]} == {each.layout for each in found[1]}


def test_every_switch_is_tried_with_fixed_microbatches():
    batching = Batching(mode="fixed", micro_batch_size=2, max_tokens=None)
    given = config(2, batching=batching)
    found = list(candidates(given, open_estimator(given, 80), tflops=100.0, overhead_ms=1.0))
    switches = {(each.values["actor.gradient_checkpointing"], each.values["actor.offload"]) for each in found}
    assert switches == set(product(("none", "selective", "full"), ("none", "optimizer")))


def test_layouts_that_shared_prompts_exclude_are_left_out():
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    batching, rollout = Batching(max_tokens=256, share_prompts=True), Rollout(max_new_tokens=32)
    trainer = Trainer(prompts_per_step=8, group_size=4, mini_batch_size=16)
    placement = Placement(pools={"main": Pool(ranks=4, gpus_per_rank=1.0)}, address="auto")
    sections = {"data": DATA, "trainer": trainer, "actor": Actor(isolation_check=False), "placement": placement}
    given = tiny_config("grpo", batching=batching, rollout=rollout, model=Model(config=MODEL | sizes), **sections)
    found = list(candidates(given, open_estimator(given, 80), tflops=100.0, overhead_ms=1.0))
    assert {each.layout[1] for each in found} == {1}  # gathered keys need aligned rows


def grpo_config(max_tokens: int, parallel: Parallel) -> Config:
    """Return a configuration whose longest row may have 64 + 136 tokens, on 4 ranks."""
    trainer = Trainer(prompts_per_step=8, group_size=4, mini_batch_size=16)
    placement = Placement(pools={"main": Pool(ranks=4, gpus_per_rank=1.0)}, address="auto")
    actor = Actor(isolation_check=False, parallel=parallel)
    sections = {"data": DATA, "trainer": trainer, "actor": actor, "placement": placement}
    return tiny_config(
        "grpo", batching=Batching(max_tokens=max_tokens), rollout=Rollout(max_new_tokens=136), **sections
    )


def test_a_layout_may_need_a_larger_budget_than_the_configured_one():
    given = grpo_config(64, Parallel(cp=4, cp_method="all_gather"))
    found = list(candidates(given, open_estimator(given, 80), tflops=100.0, overhead_ms=1.0))
    budgets = {cp: {each.values["batching.max_tokens"] for each in found if each.layout[1] == cp} for cp in (1, 2, 4)}
    assert budgets == {1: {256}, 2: {256, 128}, 4: {256, 128, 64}}


def test_budgets_hold_the_longest_row_that_a_run_may_have_not_only_those_of_the_first_batch():
    given = grpo_config(256, Parallel())
    estimator = open_estimator(given, 80)
    assert estimator.batch(given).longest <= 192
    found = list(candidates(given, estimator, tflops=100.0, overhead_ms=1.0))
    budgets = {each.values["batching.max_tokens"] for each in found if each.layout[1] == 1}
    assert min(budgets) == 256
    assert not [problem for each in found for problem in broken_rules(each.config)]


def test_switches_that_the_rules_refuse_are_left_out():
    given = config(2, actor=Actor(isolation_check=False, compile=True))
    found = list(candidates(given, open_estimator(given, 80), tflops=100.0, overhead_ms=1.0))
    assert {each.values["actor.gradient_checkpointing"] for each in found} == {"none", "full"}
    assert {each.layout[1:5] for each in found} == {(1, 1, 1, 1)}
    assert not [problem for each in found for problem in broken_rules(each.config)]


def test_stages_wait_while_the_pipeline_fills_and_drains():
    given = config(batching=Batching(max_tokens=128))
    found = {}
    for each in candidates(given, open_estimator(given, 80), tflops=1e-6, overhead_ms=1e-9):
        if each.values["actor.gradient_checkpointing"] == "none":
            found.setdefault((each.layout, each.values["batching.max_tokens"]), each)
    # Four ranks with the same rows: as two stages of two ranks each, or without stages.
    staged, whole = found[(1, 2, 1, 2, 1, 1), 128], found[(1, 4, 1, 1, 1, 1), 128]
    assert staged.plan.per_step % 2 == 0
    assert staged.seconds / whole.seconds == pytest.approx(1 + 1 / staged.plan.per_step, rel=1e-4)


def test_virtual_stages_wait_less_where_each_gets_as_many_layers():
    deep = Model(config=MODEL | {"num_hidden_layers": 12})
    given = config(batching=Batching(max_tokens=128), model=deep)
    found = {}
    for each in candidates(given, open_estimator(given, 80), tflops=1e-6, overhead_ms=1e-9):
        if each.values["actor.gradient_checkpointing"] == "none" and each.values["batching.max_tokens"] == 128:
            found[each.layout] = each
    virtual = {pp: {layout[5] for layout in found if layout[3] == pp} for pp in (1, 2, 4)}
    assert virtual == {1: {1}, 2: {1, 2}, 4: {1}}  # 12 layers: 2 · 2 stages of 3, but 2 · 4 and 4 · 2 don't divide them
    whole, staged = found[1, 4, 1, 1, 1, 1], found[1, 2, 1, 2, 1, 2]
    assert staged.values["actor.parallel.vpp"] == 2
    assert staged.seconds / whole.seconds == pytest.approx(1 + 1 / 2 / staged.plan.per_step, rel=1e-4)


def test_the_search_ends_at_its_deadline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout_search, "_SECONDS", 0.0)
    monkeypatch.setattr(layout_search, "_MOST_SECONDS", 0.0)
    assert main(config(2), 80, None, 10.0, print)  # the fastest is always tried
    assert re.search(r"the search stopped after \d+ s of CPU time", capsys.readouterr().out)
    assert not main(config(2), 0.001, None, 10.0, print)
    assert "none of those that were tried fits; use more ranks" in capsys.readouterr().out


def rewarded(folder: Path, family: str, **shape: Any) -> Config:
    """Return a configuration of 4 ranks with a reward model of two layers."""
    sizes = {"hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "pad_token_id": 0}
    classifier = AutoConfig.for_model(family, **(sizes | shape), num_labels=1)
    AutoModelForSequenceClassification.from_config(classifier).save_pretrained(folder)
    sections = {"data": DATA, "rollout": Rollout(max_new_tokens=32), "batching": Batching(max_tokens=512)}
    trainer = Trainer(prompts_per_step=8, group_size=4, mini_batch_size=16)
    return tiny_config(
        "grpo",
        **sections,
        trainer=trainer,
        reward_model=RewardModel(path=str(folder), weight=1.0),
        placement=Placement(pools={"main": Pool(ranks=4, gpus_per_rank=1.0)}, address="auto"),
    )


def test_layouts_that_a_reward_model_of_its_own_does_not_fit_are_left_out(tmp_path: Path):
    # The policy has 4 heads, 2 of keys and values; the reward model has 3 of each.
    given = rewarded(tmp_path, "llama", num_attention_heads=3, num_key_value_heads=3)
    estimator = open_estimator(given, 80)
    assert estimator.can_run(with_value(given, "actor.parallel.pp", 2))
    assert not estimator.can_run(with_value(given, "actor.parallel.tp", 2))
    found = list(candidates(given, estimator, tflops=100.0, overhead_ms=1.0))
    sizes = (1, 2, 4)
    layouts = {(*each, 1, 1) for each in product(sizes, sizes, (1,), (1, 2)) if 4 % prod(each) == 0}
    assert {each.layout for each in found} == layouts
    assert {each.values["actor.parallel.cp_method"] for each in found if each.layout[1] > 1} == {"all_gather"}


def vllm_config(share: float | None) -> Config:
    """Return a configuration with vLLM in a separate pool, where it takes a share of a GPU; None for its default."""
    pools = {name: Pool(ranks=2, gpus_per_rank=1.0) for name in ("main", "engines")}
    placement = Placement(pools=pools, roles={"rollout": "engines"}, address="auto")
    options = {} if share is None else {"gpu_memory_utilization": share}
    rollout = Rollout.model_validate({"engine": "vllm", "max_new_tokens": 32, "vllm": options})
    sections: dict[str, Any] = {"data": DATA, "trainer": Trainer(prompts_per_step=4, group_size=4)}
    sections |= {"model": Model(config=MODEL | {"hidden_size": 128}), "actor": Actor(isolation_check=False)}
    return tiny_config("grpo", placement=placement, rollout=rollout, batching=Batching(max_tokens=256), **sections)


def least_share() -> float:
    """Return the share of a GPU of 80 GB that just holds the engine of `vllm_config`."""
    engine = open_estimator(vllm_config(None), 80).engine(vllm_config(None))
    assert engine is not None
    return (engine.weights + engine.row) / 80e9


def test_vllm_takes_its_share_of_the_whole_gpu(capsys: pytest.CaptureFixture[str]):
    # Its default share of 0.92 is more than what may be used if a tenth stays free, and 1.05 times the least share
    # is too little of nine tenths.
    for share in (None, 1.05 * least_share()):
        assert main(vllm_config(share), 80, None, 10.0, print)
        assert "none fits" not in capsys.readouterr().out


def test_no_layout_is_tried_with_a_share_that_does_not_hold_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    given, tried = vllm_config(0.95 * least_share()), list[Config]()
    (problem,) = open_estimator(given, 80).memory(given).problems()
    monkeypatch.setattr(Estimator, "memory", lambda _, variant: tried.append(variant))
    assert not main(given, 80, None, 10.0, print)
    assert capsys.readouterr().out == f"none fits: {problem}\n"
    assert problem.startswith("vLLM's share of ")
    assert not tried


def test_no_layout_is_tried_if_generation_alone_needs_too_much(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Estimator, "memory", lambda *_: pytest.fail("a layout was tried"))
    generates = grpo_config(256, Parallel()).model_copy(update={"rollout": Rollout(max_new_tokens=180)})
    assert not main(generates, 1.05, None, 10.0, print)
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"none fits: for generation alone, without the models of other roles, pool main needs 1 GB of each GPU, "
        r"which has 945 MB \(10% stays free\); use fewer rows at once \(rollout\.max_num_seqs\), shorter rows, .*",
        line,
    )


def test_the_search_finds_what_trying_everything_finds():
    # Memory is concave at 512 slots, the rows of logits that are computed at a time.
    given = config(2, batching=Batching(max_tokens=1024), actor=Actor(isolation_check=False, logprob_chunk=512))
    estimator = open_estimator(given, 80)
    ordered = sorted(candidates(given, estimator, tflops=100.0, overhead_ms=1.0), key=lambda each: each.order)
    known: dict[int, RunMemory] = {id(each.config): estimator.memory(each.config) for each in ordered}
    of_limit, tried = MemoryLimits(0, None), list[float]()

    def with_limit(variant: Config) -> RunMemory:
        tried.append(slots_of[id(variant)])
        memory = known[id(variant)]
        return replace(memory, pools=tuple(replace(pool, limit=of_limit.device) for pool in memory.pools))

    slots_of = {id(each.config): each.slots for each in ordered}
    estimator.__dict__["memory"] = with_limit
    peaks = sorted({max(pool.peak for pool in memory.pools) for memory in known.values()})
    for limit in [0, *peaks[:: max(1, len(peaks) // 12)], peaks[-1]]:
        of_limit = MemoryLimits(limit, None)
        fits = [each for each in ordered if all(pool.peak <= limit for pool in known[id(each.config)].pools)]
        first: dict[tuple[int, ...], Candidate] = {}
        for each in fits:
            first.setdefault(each.layout, each)
        tried.clear()
        found = [candidate for candidate, _ in LayoutSearch(ordered, estimator, math.inf).run()[0]]
        assert found == list(first.values())[:3]
        if not fits:
            assert max(tried) < max(slots_of.values()), "one of the largest microbatches was estimated for nothing"


def test_the_model_of_a_critic_of_its_own_is_checked_not_the_policy(tmp_path: Path):
    shape = {"model_type": "llama", "num_attention_heads": 1, "num_key_value_heads": 1}
    one_head = AutoConfig.for_model(**(MODEL | shape), vocab_size=128)
    AutoModelForCausalLM.from_config(one_head).save_pretrained(tmp_path)
    given = grpo_config(256, Parallel())
    sections = {name: getattr(given, name) for name in ("data", "trainer", "placement", "batching", "rollout")}
    for critic, fits in ((Critic(), True), (Critic(path=str(tmp_path)), False)):
        own = tiny_config("ppo", critic=critic, **sections)
        assert open_estimator(own, 80).can_run(with_value(own, "actor.parallel.tp", 2)) == fits


def test_the_search_goes_on_with_a_reward_model_that_tp_cannot_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = rewarded(tmp_path, "gpt_neox", num_attention_heads=4, hidden_size=32)
    # Nothing fits, so variants with tp would be reached, too.
    assert not main(given, 0.5, None, 10.0, print)
    assert "none fits" in capsys.readouterr().out


def test_variants_without_offloading_are_found_where_host_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    # Several ranks would need more for the whole model at the start than for the state of a part. Every variant has
    # several microbatches.
    given = config(1, batching=Batching(max_tokens=128))
    estimator = open_estimator(given, 80)
    kept = estimator.memory(given).host
    assert estimator.memory(with_value(given, "actor.offload", "optimizer")).host > kept
    estimator.limits = MemoryLimits(int(80e9), kept)
    ordered = sorted(candidates(given, estimator, tflops=100.0, overhead_ms=1.0), key=lambda each: each.order)
    offloaded, memory = list[str](), Estimator.memory

    def noted(self: Estimator, variant: Config) -> Any:
        offloaded.append(variant.actor.offload)
        return memory(self, variant)

    monkeypatch.setattr(Estimator, "memory", noted)
    found = [candidate for candidate, _ in LayoutSearch(ordered, estimator, math.inf).run()[0]]
    assert [each.values["actor.offload"] for each in found] == ["none"]
    assert offloaded[0] == "optimizer"
    assert set(offloaded[1:]) == {"none"}
    # Without enough memory of a device, one variant of each family is tried.
    before = len(offloaded)
    estimator.limits = MemoryLimits(1, kept)
    assert LayoutSearch(ordered, estimator, math.inf).run() == ([], False)
    assert len(offloaded) == before + len({each.family for each in ordered})


@pytest.mark.parametrize("host", [None, pytest.param(1, marks=pytest.mark.long)])
def test_no_variant_is_tried_twice(monkeypatch: pytest.MonkeyPatch, host: int | None):
    given = config(2, batching=Batching(max_tokens=128))
    estimator = open_estimator(given, 80)
    estimator.limits = MemoryLimits(int(80e9), host)
    ordered = sorted(candidates(given, estimator, tflops=100.0, overhead_ms=1.0), key=lambda each: each.order)
    tried, memory = list[int](), Estimator.memory

    def noted(self: Estimator, variant: Config) -> Any:
        tried.append(id(variant))
        return memory(self, variant)

    monkeypatch.setattr(Estimator, "memory", noted)
    found, _ = LayoutSearch(ordered, estimator, math.inf).run()
    assert len(found) == (3 if host is None else 0)
    assert len(tried) == len(set(tried)) > 0


def test_a_variant_that_cannot_run_is_not_taken_for_one_that_is_too_large(monkeypatch: pytest.MonkeyPatch):
    given = config(2, batching=Batching(max_tokens=128))  # every variant has several microbatches
    estimator = open_estimator(given, 80)
    ordered = sorted(candidates(given, estimator, tflops=100.0, overhead_ms=1.0), key=lambda each: each.order)
    wanted = [candidate.layout for candidate, _ in LayoutSearch(ordered, estimator, math.inf).run()[0]]
    memory, refused = Estimator.memory, list[int]()

    def refusing(self: Estimator, variant: Config) -> Any:
        # In each family, the variant with the least memory offloads the optimizer state.
        if variant.actor.offload == "optimizer":
            refused.append(id(variant))
            raise ModelError("another role can't run with what it inherits")
        return memory(self, variant)

    monkeypatch.setattr(Estimator, "memory", refusing)
    assert [candidate.layout for candidate, _ in LayoutSearch(ordered, estimator, math.inf).run()[0]] == wanted
    assert len(wanted) == 3
    assert len(refused) == len(set(refused)) > 0

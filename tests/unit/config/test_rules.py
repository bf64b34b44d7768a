from pathlib import Path

import pytest

from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError
from rlpack.config.rules import broken_rules
from rlpack.config.validate import validate
from rlpack.config.warnings import config_warnings

VALID = {"model": {"config": {"model_type": "qwen2"}}}
PPO, SFT = {"target": "rlpack.recipes.ppo"}, {"target": "rlpack.recipes.sft"}
SERVED = "rlpack.workers.served_reward_model:ServedRewardModelWorker"


def broken(**sections):
    with pytest.raises(ConfigError) as caught:
        validate(VALID | sections)
    return "\n".join(caught.value.problems)


def test_a_plain_config_breaks_no_rule():
    assert broken_rules(validate(VALID)) == []
    assert config_warnings(validate(VALID)) == []


@pytest.mark.parametrize(
    ("budget", "fits"), [({"max_tokens": 768}, True), ({"max_tokens": 767}, False), ({"max_tokens": 1}, False)]
)
def test_the_token_budget_holds_the_longest_prompt_and_response(budget, fits):
    config = VALID | {"data": {"max_prompt_tokens": 512}, "rollout": {"max_new_tokens": 256}}
    if fits:
        validate(config | {"batching": budget})
    else:
        assert "under the 768 slots" in broken(**config, batching=budget)


def test_alignment_counts_against_the_token_budget():
    batching = {"max_tokens": 768, "pad_to_multiple": 500}
    assert "under the 1000 slots" in broken(batching=batching)
    validate(VALID | {"batching": batching | {"mode": "fixed"}})
    assert "under the 1000 slots" in broken(batching={"max_tokens": 768, "mode": "dynamic", "length_multiple": 500})


@pytest.mark.parametrize("overlong", ["truncate", "drop", "own_microbatch"])
def test_a_small_budget_is_allowed_where_overlong_sequences_have_a_way_out(overlong):
    validate(VALID | {"batching": {"max_tokens": 8, "overlong": overlong}})


def test_the_reference_budget_is_checked_when_a_kl_term_starts_it():
    small = {"reference": {"batching": {"max_tokens": 8}}}
    validate(VALID | small)
    assert "for the role reference" in broken(**small, algorithm={"kl_coef": 0.1})


def test_the_way_out_of_a_small_budget_is_the_key_that_is_read():
    own = {"reference": {"batching": {"max_tokens": 8, "overlong": "error"}}, "algorithm": {"kl_coef": 0.1}}
    assert "set reference.batching.overlong=own_microbatch" in broken(**own)
    own["reference"]["batching"].pop("overlong")
    assert "set batching.overlong=own_microbatch" in broken(**own)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"clip_low": 0.3, "clip_high": 0.2}},
            "algorithm.clip_low (0.3) exceeds algorithm.clip_high (0.2); lower",
        ),
        ({"algorithm": {"aggregation": "seq_mean_token_sum_norm"}}, "set algorithm.aggregation_constant"),
        ({"algorithm": {"aggregation_constant": 5.0}}, "but algorithm.aggregation is token_mean"),
        (
            {"rollout": {"vllm": {"swap_space": 4}}},
            "rollout.vllm is {'swap_space': 4}, which rollout.engine=hf doesn't read; set rollout.engine=vllm",
        ),
        ({"rollout": {"kv_cache_gb": 2.0}}, "rollout.kv_cache_gb is 2.0, which rollout.engine=hf doesn't read"),
        ({"rollout": {"sleep_level": 1}}, "rollout.sleep_level is 1, which rollout.engine=hf doesn't read"),
        (
            {"rollout": {"engine": "vllm", "sleep_level": 1}},
            "rollout.sleep_level is 1, but the role rollout runs on CPUs, where vLLM frees nothing; set it to null",
        ),
        (
            {
                "rollout": {"engine": "vllm", "sleep_level": 2, "lora": "adapter"},
                "actor": {"lora": {"rank": 8}},
                "placement": {"pools": {"main": {"ranks": 1, "gpus_per_rank": 1}}},
            },
            "rollout.sleep_level is 2, which discards the engine's weights, but rollout.lora=adapter sends only "
            "adapters; set rollout.sleep_level=1, or rollout.lora=merged",
        ),
        ({"rollout": {"compile": False}}, "rollout.compile is False, which rollout.engine=hf doesn't read"),
        ({"rollout": {"lora": "adapter"}}, "rollout.engine=hf takes merged weights; set rollout.engine=vllm"),
        (
            {"rollout": {"engine": "vllm", "lora": "adapter"}},
            "rollout.lora is adapter, but actor.lora.rank is 0, so there are no adapters; set actor.lora.rank, such as "
            "to 16, or rollout.lora=merged",
        ),
        (
            {"rollout": {"engine": "vllm", "lora": "adapter"}, "actor": {"lora": {"rank": 513}}},
            "actor.lora.rank is 513, but vLLM applies adapters up to rank 512; lower it, or set rollout.lora=merged",
        ),
        (
            {"rollout": {"deterministic": True}},
            "rounding depends on the rows that run together; set rollout.engine=vllm",
        ),
        ({"rollout": {"dtype": "bf16"}}, "rollout.dtype is bf16, but rollout.engine=hf generates in fp32; set roll"),
        (
            {"rollout": {"engine": "vllm"}, "placement": {"pools": {"main": {"ranks": 2, "gpus_per_rank": 0.5}}}},
            "the pool of the role rollout has gpus_per_rank=0.5, but vLLM takes whole GPUs or none; set it to 1 or",
        ),
        ({"algorithm": {"dual_clip": 0.5}}, "algorithm.dual_clip is 0.5; it has to be more than 1"),
        (
            {"placement": {"object_store_gb": 1, "in_flight_gb": 2}},
            "in_flight_gb (2) exceeds placement.object_store_gb (1); lower",
        ),
        ({"placement": {"in_flight_gb": 1e-6}}, "placement.in_flight_gb"),
        (
            {"actor": {"optimizer": {"min_lr_ratio": 0.1}}},
            "min_lr_ratio is 0.1, but actor.optimizer.schedule is constant",
        ),
        (
            {"actor": {"optimizer": {"warmup_steps": 9}}, "trainer": {"steps": 9}},
            "actor.optimizer.warmup_steps (9) leaves no step of trainer.steps (9) at peak rate; lower actor.",
        ),
        (
            {"recipe": PPO, "critic": {"optimizer": {"warmup_steps": 9}}, "trainer": {"steps": 9}},
            "critic.optimizer.warmup_steps (9) leaves no step of trainer.steps (9) at peak rate; lower critic.",
        ),
        (
            {
                "recipe": PPO,
                "critic": {"warmup_steps": 5},
                "actor": {"optimizer": {"warmup_steps": 4}},
                "trainer": {"steps": 9},
            },
            "actor.optimizer.warmup_steps (4) leaves no step at peak rate, as only 4 of the 9 trainer.steps follow",
        ),
        (
            {"actor": {"optimizer": {"warmup_steps": 1.5}}},
            "actor.optimizer.warmup_steps is 1.5; it has to be a whole number of steps, or below 1 the fraction of",
        ),
        (
            {"actor": {"lora": {"rank": 4}, "optimizer": {"freeze": ["a"]}}},
            "actor.lora.rank is 4, which freezes every weight but the adapters, and actor.optimizer.freeze is set too",
        ),
        (
            {"algorithm": {"kl_placement": "reward"}},
            "algorithm.kl_coef is 0, so algorithm.kl_placement=reward would have no effect; set algorithm.kl_coef "
            "above 0, or algorithm.kl_placement=loss",
        ),
        (
            {"algorithm": {"kl_placement": "reward", "kl_target": 0.5}},
            "so algorithm.kl_target=0.5 and algorithm.kl_placement=reward would have no effect; set algorithm.kl_coef "
            "above 0, or algorithm.kl_target=null algorithm.kl_placement=loss",
        ),
        ({"actor": {"lora": {"targets": ["a"]}}}, "actor.lora.targets is set, but actor.lora.rank is 0"),
        ({"actor": {"lora": {"dropout": 0.1}}}, "actor.lora.dropout is set, but actor.lora.rank is 0"),
        ({"model": {}}, "lacks model_type"),
        ({"model": {"path": "a/b", "config": {"model_type": "qwen2"}}}, "choose model=pretrained"),
        ({"model": {"path": "a/b", "trust_remote_code": True}}, "set model.path and model.revision"),
        (
            {"model": {"path": "a/b", "revision": "abc", "tokenizer": "a/c", "trust_remote_code": True}},
            "model.tokenizer, 'a/c', has no pinned commit; set model.tokenizer_revision, or set",
        ),
        ({"model": {"config": {"model_type": "qwen2"}, "revision": "abc"}}, "a revision needs a hub model"),
        ({"model": {"path": "a/b", "tokenizer_revision": "abc"}}, "but the tokenizer is that of model.path"),
        (
            {"model": {"path": "a/b", "tokenizer": "a/b", "tokenizer_revision": "abc"}},
            "set model.tokenizer to another, or model.tokenizer_revision=null",
        ),
        ({"critic": {"revision": "abc"}}, "critic.revision is 'abc', but critic.path is null"),
        ({"data": {"source": "x.jsonl", "generator": {"noise": 0}}}, "choose data=jsonl"),
        ({"data": {"source": "x.jsonl"}}, "data.validation_source is null, but x.jsonl is one file without splits"),
        ({"data": {"source": "x.parquet", "split": "a"}}, "set data.validation_source to other prompts, or to x.par"),
        ({"data": {"source": "a/b", "validation_split": "train"}}, "data.validation_split are both 'train'"),
        ({"data": {"prompt_column": " "}}, "data.prompt_column is blank"),
        ({"sft_warmup": {"steps": 5}}, "sft_warmup.steps=5 trains on demonstrations; set data.completion_column, or"),
        ({"recipe": SFT}, "recipe=sft trains on demonstrations; set data.completion_column"),
        ({"recipe": SFT, "sft_warmup": {"steps": 5}}, "recipe=sft has no warm-up; add sft_warmup.steps=0"),
        (
            {"recipe": SFT, "trainer": {"updates_per_batch": 2}},
            "leave trainer.mini_batch_size=null and trainer.updates_per_batch=1",
        ),
        ({"reward": {"function": "os.system"}}, "reward.function is 'os.system'; it has to be package.module:Name"),
        ({"reward": {"function": "a:b;c"}}, "it has to be package.module:Name"),
        ({"reward": {"arguments": {"api_key": "x"}}}, "reward.arguments.api_key looks like a secret"),
        ({"reward": {"arguments": {"judge": {"auth_token": "x"}}}}, "reward.arguments.judge.auth_token looks like"),
        (
            {"roles": {"judge": {"target": "a:B", "arguments": {"api_key": "x"}}}},
            "roles.judge.arguments.api_key looks like a secret",
        ),
        ({"reward": {"arguments": {"hub_token": "x"}}}, "reward.arguments.hub_token looks like a secret"),
        (
            {"reward": {"arguments": {"judges": [{"token": "x"}]}}},
            "reward.arguments.judges.0.token looks like a secret",
        ),
        (
            {"reward": {"functions": {"a": {"function": "a:b"}}, "arguments": {"x": 1}}},
            "reward.functions has a, but reward.function or reward.arguments is set too",
        ),
        ({"reward": {"functions": {"a": {"function": "a.b"}}}}, "reward.functions.a.function is 'a.b'; it has to be"),
        ({"reward": {"functions": {"a-b": {"function": "a:b"}}}}, "reward.functions holds the name 'a-b'"),
        (
            {"reward": {"functions": {"a": {"function": "a:b", "arguments": {"api_key": "x"}}}}},
            "reward.functions.a.arguments.api_key looks like a secret",
        ),
        ({"reward": {"function": "rlpack.rewards.code_execution:unit_tests"}}, "set reward.subprocesses=1"),
        ({"placement": {"call_timeout_s": 10.0}}, "reward.timeout_s (10) is not below placement.call_timeout_s (10)"),
        ({"placement": {"call_timeout_s": 600.0}}, "lower reward.batch_timeout_s or raise placement.call_timeout_s"),
        (
            {"reward": {"functions": {"slow": {"function": "a:b", "timeout_s": 2000.0}}}},
            "reward.functions.slow.timeout_s (2000) is not below placement.call_timeout_s (1800)",
        ),
        (
            {
                "roles": {"judge": {"target": "rlpack.workers.judge:JudgeWorker"}},
                "judge": {"url": "http://a/v1", "model": "m", "timeout_s": 3600.0},
            },
            "a row may take 10803 s with judge.timeout_s=3600, judge.retries=2 and judge.backoff_s=1, which is not "
            "below placement.call_timeout_s (1800)",
        ),
        (
            {
                "roles": {"judge": {"target": SERVED}},
                "judge": {"url": "http://a/v1", "model": "m", "timeout_s": 1800.0, "retries": 0},
            },
            "a row may take 1800 s with judge.timeout_s=1800, which is not below placement.call_timeout_s (1800)",
        ),
        (
            {
                "roles": {"judge": {"target": "rlpack.workers.judge:JudgeWorker"}},
                "judge": {"url": "http://a/v1", "model": "m", "retries": 12},
            },
            "a row may take 4875 s with judge.timeout_s=60, judge.retries=12 and judge.backoff_s=1",
        ),
        ({"roles": {"scorer": {"target": SERVED}}}, "judge.url is null, but the role scorer needs it"),
        (
            {
                "roles": {"judge": {"target": "rlpack.workers.judge:JudgeWorker"}, "scorer": {"target": SERVED}},
                "judge": {"url": "http://a/v1", "model": "m"},
            },
            "the roles judge, scorer would all call the server of judge.url; keep one of them",
        ),
        (
            {
                "roles": {"scorer": {"target": SERVED}},
                "judge": {"url": "http://a/v1", "model": "m"},
                "reward": {"functions": {"served_model": {"function": "a:b"}}},
            },
            "the role scorer and reward.functions.served_model would both add the column reward_served_model",
        ),
        ({"judge": {"url": "http://a/v1"}}, f"or, for a reward model, roles.judge.target={SERVED}"),
        ({"judge": {"url": "http://a/v1"}}, "no role uses it; add roles.judge.target=rlpack.workers.judge:JudgeWorker"),
        ({"judge": {"url": "a/v1"}}, "judge.url is 'a/v1'; it has to start with http:// or https://"),
        ({"judge": {"url": "http://me:secret@a/v1"}}, "judge.url contains a user or a password"),
        (
            {"roles": {"judge": {"target": "rlpack.workers.judge:JudgeWorker"}}, "judge": {"url": "http://a/v1"}},
            "judge.model is null, but the role judge needs it",
        ),
        ({"placement": {"pools": {}}}, "placement.pools is empty"),
        ({"placement": {"roles": {"actor": "gpu"}}}, "placement.roles.actor is 'gpu'; placement.pools has: main"),
        ({"placement": {"roles": {"acter": "main"}}}, "names a role that doesn't exist; roles has: actor,"),
        ({"placement": {"pools": {"main": {}, "b": {}}}}, "placement.pools.b has no role"),
        ({"placement": {"pools": {"main": {"gpus_per_rank": 1.5}}}}, "main.gpus_per_rank is 1.5; it has to be 0 or 1"),
        (
            {"rollout": {"engine": "vllm"}, "placement": {"pools": {"main": {"gpus_per_rank": 2.0}}}},
            "Only a pool with no role but rollout, with rollout.engine=vllm, may have several, which share the model",
        ),
        ({"placement": {"pools": {"main": {"gpus_per_rank": 0.5}}}}, "main.gpus_per_rank is 0.5; it has to be 0 or 1"),
        ({"placement": {"pools": {"main": {"gpus_per_rank": 2.0}}}}, "main.gpus_per_rank is 2.0; it has to be 0 or 1"),
        ({"placement": {"pools": {"../x": {}}, "roles": {}}}, "holds the name '../x'"),
        ({"roles": {"actor": {"target": "a:B"}}}, "recipe=grpo needs the role rollout"),
        ({"resume": "auto"}, "resume=auto needs the directory of the run to resume; set run_dir"),
        ({"run_dir": ""}, "run_dir is blank"),
    ],
)
def test_keys_that_do_not_go_together_are_named(sections, message):
    assert message in broken(**sections)


@pytest.mark.parametrize("gpus", [0, 1])
def test_vllm_takes_whole_gpus_or_none_and_its_keys(gpus: int):
    rollout = {"engine": "vllm", "vllm": {"swap_space": 4}, "kv_cache_gb": 2, "compile": True, "dtype": "bf16"}
    validate(VALID | {"rollout": rollout, "placement": {"pools": {"main": {"ranks": 1, "gpus_per_rank": gpus}}}})


def test_a_pool_of_vllm_alone_may_have_several_gpus_per_rank():
    pools = {"main": {"ranks": 2}, "engines": {"ranks": 2, "gpus_per_rank": 4}}
    placement = {"pools": pools, "roles": {"rollout": "engines"}}
    validate(VALID | {"rollout": {"engine": "vllm"}, "placement": placement})
    assert "engines.gpus_per_rank is 4.0; it has to be 0 or 1" in broken(placement=placement)
    shared = placement | {"roles": {"rollout": "engines", "reference": "engines"}}
    assert "it has to be 0 or 1" in broken(rollout={"engine": "vllm"}, placement=shared)
    pools["engines"]["gpus_per_rank"] = 1.5
    assert "vLLM takes whole GPUs or none" in broken(rollout={"engine": "vllm"}, placement=placement)


def test_a_rise_may_take_all_steps_but_one_or_any_where_there_are_none():
    for steps in (10, 0):
        validate(VALID | {"actor": {"optimizer": {"warmup_steps": 9}}, "trainer": {"steps": steps}})


@pytest.mark.parametrize("source", ["nope.jsonl", "nope.parquet"])
def test_a_missing_file_is_named_before_what_it_lacks(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = broken(data={"source": source})
    missing, unheld = f"data.source is '{source}', but there is no such file in", "data.validation_source is null"
    assert 0 <= said.find(missing) < said.find(unheld)
    (tmp_path / source).touch()
    assert missing not in broken(data={"source": source})


def test_a_file_of_a_user_without_a_home_is_named():
    assert "data.source is '~nobody-here/x.jsonl', but there is no" in broken(data={"source": "~nobody-here/x.jsonl"})


def test_token_ids_and_empty_values_are_no_secrets():
    config = {"model": {"config": {"model_type": "qwen2", "pad_token_id": 0, "eos_token": "x"}}}
    validate(config | {"reward": {"arguments": {"api_key": None}}})


@pytest.mark.parametrize("data", [{"validation_source": "y.jsonl"}, {"validation_source": "x.jsonl"}])
def test_a_file_with_a_source_of_held_out_prompts_is_allowed_be_it_the_same_file(data):
    validate(VALID | {"data": {"source": "x.jsonl"} | data})


def test_a_mini_batch_over_the_rollout_batch_is_one_step_and_spoken_of():
    assert config_warnings(validate(VALID | {"trainer": {"mini_batch_size": 256}})) == []
    assert "256 sequences" in config_warnings(validate(VALID | {"trainer": {"mini_batch_size": 257}}))[0]


def test_a_mini_batch_of_a_preset_over_the_rollout_batch_is_not_spoken_of():
    config = validate(VALID | {"trainer": {"mini_batch_size": 257}})
    assert config_warnings(config, {"trainer.prompts_per_step"}) == []
    assert len(config_warnings(config, {"trainer.mini_batch_size"})) == 1


@pytest.mark.parametrize("given", [None, {"trainer.group_size"}])
def test_mini_batches_of_unequal_sizes_are_spoken_of(given: set[str] | None):
    (text,) = config_warnings(validate(VALID | {"trainer": {"mini_batch_size": 100}}), given)
    assert text.startswith("trainer.mini_batch_size is 100: a rollout batch has 256 sequences, so the last")
    assert text.endswith("only 56")
    assert config_warnings(validate(VALID | {"trainer": {"mini_batch_size": 128}}), given) == []


def test_a_new_model_without_warm_up_is_spoken_of_on_data_of_ones_own(tmp_path: Path):
    own = VALID | {"data": {"source": "x.jsonl", "validation_source": "y.jsonl"}}
    (text,) = config_warnings(validate(own))
    assert text.startswith("model.path is null and sft_warmup.steps is 0: a new model's responses are random")
    taught = own | {"sft_warmup": {"steps": 1}, "data": own["data"] | {"completion_column": "worked"}}
    for config in (VALID, taught, own | {"model": {"path": str(tmp_path)}}):
        assert config_warnings(validate(config)) == []


@pytest.mark.parametrize(("key", "size"), [("sp=false", "tp"), ("cp_method=all_gather", "cp")])
def test_a_setting_of_a_layout_that_no_role_has_is_spoken_of(key: str, size: str):
    (text,) = config_warnings(compose([f"actor.parallel.{key}"]))
    assert text.endswith(f"but unused: no role has {size} above 1")
    for role in ("actor", "reference"):  # the reference inherits the method
        assert config_warnings(compose([f"actor.parallel.{key}", f"{role}.parallel.{size}=2"])) == []


def test_dropout_of_adapters_is_spoken_of_where_ratios_are_clipped():
    noisy = VALID | {"actor": {"lora": {"rank": 2, "dropout": 0.1}}}
    assert "actor.lora.dropout is 0.1" in config_warnings(validate(noisy))[0]
    assert config_warnings(validate(noisy | {"recipe": SFT, "data": {"completion_column": "d"}})) == []


def test_a_group_of_one_can_run_but_is_spoken_of():
    (text,) = config_warnings(validate(VALID | {"trainer": {"group_size": 1}}))
    assert "a group of one" in text
    assert text.endswith("choose recipe=remax or recipe=reinforce_plus_plus, which need no groups")
    for recipe in ("remax", "reinforce_plus_plus"):
        assert config_warnings(compose([f"recipe={recipe}", "trainer.group_size=1"]), set()) == []
    assert (
        "a group of one"
        in config_warnings(compose(["recipe=reinforce_plus_plus_baseline", "trainer.group_size=1"]), set())[0]
    )


@pytest.mark.parametrize(
    "preset", sorted(path.stem for path in (Path(__file__).parents[3] / "configs" / "recipe").glob("*.yaml"))
)
def test_a_preset_chooses_nothing_odd(preset: str):
    for overrides in ((), ("experiment=smoke",))[: 1 if preset == "sft" else 2]:  # smoke has a warm-up
        assert config_warnings(compose([f"recipe={preset}", *overrides])) == []


def test_offloading_is_refused_where_it_could_not_work():
    eight_bit = {"offload": "optimizer", "optimizer": {"name": "adamw_8bit"}}
    assert "actor.offload is optimizer, but actor.optimizer.name is adamw_8bit" in broken(actor=eight_bit)
    validate(VALID | {"actor": eight_bit | {"offload": "parameters"}})
    inherits = {"optimizer": {"name": "adamw_8bit"}}
    assert "critic.offload=none or parameters" in broken(recipe=PPO, actor={"offload": "optimizer"}, critic=inherits)
    assert "reference.offload is optimizer, but reference isn't trained" in broken(reference={"offload": "optimizer"})


def test_offloading_without_gpus_is_a_warning_for_each_role_that_runs():
    config = VALID | {"actor": {"offload": "parameters"}, "algorithm": {"kl_coef": 0.1}}
    actor, reference = config_warnings(validate(config))
    assert actor.startswith("actor.offload is parameters: the pool of actor (main) has no GPUs")
    assert reference.startswith("reference.offload is parameters")
    only_moments = config | {"actor": {"offload": "optimizer"}}  # a reference has none
    assert len(config_warnings(validate(only_moments))) == 1
    on_gpu = {"pools": {"main": {"ranks": 1, "gpus_per_rank": 1}}}
    assert config_warnings(validate(config | {"placement": on_gpu})) == []

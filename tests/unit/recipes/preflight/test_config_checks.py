"""Mistakes that are reported before any process starts."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlpack.batch.errors import DataError
from rlpack.config.roles import builtin_roles
from rlpack.config.schema import (
    Actor,
    Algorithm,
    Config,
    Critic,
    Data,
    Judge,
    Model,
    Placement,
    Pool,
    Reward,
    RewardFunction,
    Role,
    Rollout,
    SFTWarmup,
)
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.data.tokenization import character_tokenizer
from rlpack.distributed.errors import PlacementError
from rlpack.models.errors import ModelError
from rlpack.models.loading import build_causal_lm
from rlpack.packing import Batching
from rlpack.recipes.driver.splits import load_splits
from rlpack.recipes.preflight.config_checks import check_before_evaluation, check_before_start
from rlpack.rewards.errors import RewardError
from rlpack.worker import Worker, sharded
from tests.builders import MODEL, tiny_config

DATA = Data(generator={"train_size": 32, "validation_size": 4}, completion_column="demonstration", max_prompt_tokens=64)


class Mute(Worker): ...


class Custom(Worker):
    @sharded()
    def score(self, shard: Any) -> Any: ...


def check(**sections: Any) -> None:
    config: Config = tiny_config(**({"data": DATA} | sections))
    check_before_start(config, *load_splits(config))


def test_an_evaluation_is_refused_by_what_its_engine_cannot_run():
    config = tiny_config(data=DATA, rollout=Rollout(engine="vllm"))
    tokenizer, _, held_out = load_splits(config)
    with pytest.raises(ModelError, match=r"rollout\.engine=vllm: the model's heads have \d+ numbers"):
        check_before_evaluation(config, tokenizer, held_out)
    check_before_evaluation(tiny_config(data=DATA), tokenizer, held_out)


def test_an_evaluation_with_hf_is_refused_for_weights_that_stay_quantized(
    tmp_path: Path,
):
    config = tiny_config(data=DATA)
    tokenizer, _, held_out = load_splits(config)
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    quantized = {"quant_method": "gptq", "bits": 4}
    AutoConfig.for_model("qwen2", **shape, quantization_config=quantized).save_pretrained(tmp_path)
    config = tiny_config(data=DATA, model=Model(path=str(tmp_path)))
    with pytest.raises(ModelError, match=r"model\.path \('.*'\) has weights that are quantized by gptq"):
        check_before_evaluation(config, tokenizer, held_out)


def custom_role(name: str) -> dict[str, Role]:
    return {**builtin_roles(), "judge": Role(target=f"tests.unit.recipes.preflight.test_config_checks:{name}")}


def test_a_whole_run_passes():
    check()
    check(recipe="sft")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MODEL | {"hidden_sizee": 3},
            r"model\.config\.hidden_sizee is not a setting of qwen2; did you mean hidden_size",
        ),
        ({"model_type": "t5"}, "the model is a t5, which is not a causal language model"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(config: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        check(model=Model(config=config))


def test_a_role_that_no_session_could_call_is_refused_where_it_is_started():
    with pytest.raises(PlacementError, match=r"roles\.judge\.target is 'tests.*:Mute', which has no method score"):
        check(roles=custom_role("Mute"))
    check(recipe="sft", roles=custom_role("Mute"))  # starts the actor alone


def check_with(tokenizer: PreTrainedTokenizerBase, **sections: Any) -> None:
    config: Config = tiny_config(**({"data": DATA} | sections))
    _, prompts, held_out = load_splits(config)
    check_before_start(config, tokenizer, prompts, held_out)


def test_a_tokenizer_without_an_end_of_sequence_is_refused_unless_other_ids_end_a_response():
    tokenizer = load_splits(tiny_config(data=DATA))[0]
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"no end-of-sequence token \(eos_token\), so every response would run"):
        check_with(tokenizer)
    check_with(tokenizer, rollout=Rollout(stop_token_ids=(5,)))
    with pytest.raises(
        DataError, match=r"no end-of-sequence token .*which demonstrations end with; set model.tokenizer"
    ):
        check_with(tokenizer, rollout=Rollout(stop_token_ids=(5,)), sft_warmup=SFTWarmup(steps=1))


def test_a_tokenizer_without_a_padding_token_is_accepted():
    tokenizer = load_splits(tiny_config(data=DATA))[0]
    tokenizer.pad_token = None
    check_with(tokenizer)


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (
            Actor(optimizer=Optimizer(freeze=("model.layer.0.*",))),
            r"actor\.optimizer\.freeze contains 'model\.layer\.0.*the nearest are model\.layers\.0\.",
        ),
        (Actor(optimizer=Optimizer(freeze=("*",))), "freezes all weights, so nothing would be trained"),
        (Actor(optimizer=Optimizer(no_decay=("embed",))), r"no_decay contains 'embed', .*model\.embed_tokens\.weight"),
        (
            Actor(lora=Lora(rank=2, targets=("lm_head",))),
            r"lora\.targets contains 'lm_head', which matches no name",
        ),
    ],
)
def test_patterns_of_no_weight_or_of_all_are_refused(actor: Actor, message: str):
    with pytest.raises(ModelError, match=message):
        check(actor=actor)


def test_patterns_over_a_critic_are_those_of_its_own_model():
    ppo = {"recipe": "ppo", "algorithm": Algorithm(aggregation="token_mean")}
    check(**ppo, critic=Critic(optimizer=Optimizer(freeze=("model.*",))))
    check(critic=Critic(optimizer=Optimizer(freeze=("nothing",))))  # no critic is started
    with pytest.raises(ModelError, match=r"optimizer\.freeze contains 'lm_head\.weight', which matches no name"):
        check(**ppo, critic=Critic(optimizer=Optimizer(freeze=("lm_head.weight",))))


def test_a_critic_of_other_tokens_than_the_policys_is_refused(tmp_path: Path):
    ppo = {"recipe": "ppo", "algorithm": Algorithm(aggregation="token_mean")}
    policy, other = tmp_path / "policy", tmp_path / "other"
    tokenizer = load_splits(tiny_config(data=DATA))[0]
    for folder, saved in ((policy, tokenizer), (other, character_tokenizer("abc"))):
        build_causal_lm(Model(config=MODEL), vocab_size=len(tokenizer)).save_pretrained(folder)
        saved.save_pretrained(folder)
    check(**ppo, critic=Critic(path=str(policy)))
    with pytest.raises(ModelError, match=r"critic\.path is '.*other', whose tokenizer has \d+ tokens and differs"):
        check(**ppo, critic=Critic(path=str(other)))
    check(critic=Critic(path=str(other)))  # no critic is started
    weights = load_file(policy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    for changes in ({**ppo, "critic": Critic(path=str(policy))}, {"model": Model(path=str(policy))}):
        with pytest.raises(
            ModelError, match=r"(critic|model)\.path is .* lack 1 weights .* first is model\.norm\.weight"
        ):
            check(**changes)


def test_patterns_over_adapters_are_those_of_the_adapted_model():
    check(actor=Actor(lora=Lora(rank=2), optimizer=Optimizer(no_decay=("*.lora_A.*",))))
    with pytest.raises(ModelError, match="no_decay contains"):
        check(actor=Actor(optimizer=Optimizer(no_decay=("*.lora_A.*",))))


def test_a_reward_function_that_its_module_lacks_is_refused():
    with pytest.raises(RewardError, match="has no best_guess; its functions are: "):
        check(reward=Reward(function="rlpack.rewards.functions:best_guess"))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Reward(function="math:sqrt"), "math:sqrt doesn't name the texts that it takes"),
        (
            Reward(function="tests.unit.rewards.samples:score_by_level"),
            r"needs 'level'; the dataset has .*'answer'",
        ),
        (Reward(arguments={"colour": "red"}), r"reward\.arguments\.colour is not an argument"),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_refused(reward: Reward, message: str):
    with pytest.raises(RewardError, match=message):
        check(reward=reward)
    custom = {**builtin_roles(), "reward": Role(target="tests.unit.recipes.preflight.test_config_checks:Custom")}
    check(reward=reward, roles=custom)  # may call it differently


def test_each_of_several_reward_functions_is_checked():
    fine, lacking = RewardFunction(function="rlpack.rewards.functions:final_answer"), RewardFunction(function="math:no")
    with pytest.raises(RewardError, match=r"reward\.functions\.b\.function is 'math:no', but math has no no"):
        check(reward=Reward(functions={"a": fine, "b": lacking}))
    strange = fine.model_copy(update={"arguments": {"colour": "red"}})
    with pytest.raises(RewardError, match=r"reward\.functions\.b\.arguments\.colour is not an argument"):
        check(reward=Reward(functions={"a": fine, "b": strange}))


def test_variables_for_reward_functions_that_are_not_set_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("SET_FOR_REWARDS", "1")
    check(reward=Reward(env_vars=("SET_FOR_REWARDS",)))
    assert caplog.messages == []
    check(reward=Reward(env_vars=("SET_FOR_REWARDS", "UNSET_FOR_REWARDS")))
    assert caplog.messages == [
        "reward.env_vars: no variable UNSET_FOR_REWARDS is set here, so reward functions won't see it; set it before "
        "the start, or remove it from the list"
    ]


def test_a_sandbox_that_this_machine_cannot_provide_is_refused(monkeypatch: pytest.MonkeyPatch):
    strict = Reward(sandbox="strict")
    check(reward=strict)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RewardError, match=r"reward\.sandbox=strict is not available on this machine: .*; set reward"):
        check(reward=strict)


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (Judge(prompt_template="{prompt}"), r"doesn't name \{completion\}"),
        (Judge(prompt_template="{completion} {level}"), r"names \{level\}; the dataset has"),
        (
            Judge(api_key_env="NO_SUCH_KEY"),
            "judge.api_key_env is 'NO_SUCH_KEY', but that environment variable isn't set",
        ),
    ],
)
def test_a_judge_that_could_not_be_called_is_refused(judge: Judge, message: str):
    roles = {**builtin_roles(), "judge": Role(target="rlpack.workers.judge:JudgeWorker")}
    place = {"url": "http://localhost/v1", "model": "any"}
    check(roles=roles, judge=Judge(**place))
    with pytest.raises(RewardError, match=message):
        check(roles=roles, judge=judge.model_copy(update=place))


def test_a_served_reward_model_needs_its_key_and_reads_no_prompt_template():
    roles = {**builtin_roles(), "scorer": Role(target="rlpack.workers.served_reward_model:ServedRewardModelWorker")}
    judge = Judge(url="http://localhost/v1", model="any", prompt_template="{level}")
    check(roles=roles, judge=judge)
    with pytest.raises(RewardError, match=r"judge\.api_key_env is 'NO_SUCH_KEY', but that environment"):
        check(roles=roles, judge=judge.model_copy(update={"api_key_env": "NO_SUCH_KEY"}))


def test_a_reward_function_may_take_everything_that_the_reward_role_gives():
    check(reward=Reward(function="tests.unit.rewards.samples:score_by_all"))


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            Pool(ranks=60, gpus_per_rank=1.0),
            r"ask for 60 GPU, but this machine has \d+ that PyTorch can use; set placement=cpu, lower",
        ),
        (Pool(ranks=100_000), r"need 100,?000 CPUs, but this machine has \d+; at most 32 ranks may share one"),
        (Pool(ranks=100_000, cpus_per_rank=0.01), "need 100,?000 CPUs"),
    ],
)
def test_pools_that_this_machine_could_never_hold_are_refused_and_those_of_a_cluster_are_not(pool: Pool, message: str):
    with pytest.raises(PlacementError, match=message):
        check(placement=Placement(pools={"main": pool}))
    check(placement=Placement(pools={"main": pool}, address="auto"))
    check(placement=Placement(pools={"main": Pool(), "idle": pool}, roles={}))


def test_an_object_store_over_this_machines_memory_is_refused_before_ray_is_started():
    with pytest.raises(
        PlacementError, match=r"object_store_gb is 1e\+06, and this machine has .*GB of memory free; lower"
    ):
        check(placement=Placement(object_store_gb=1e6))
    check(placement=Placement(object_store_gb=0.1))


@pytest.mark.parametrize("sections", [{"recipe": "sft"}, {"sft_warmup": SFTWarmup(steps=1)}])
def test_a_demonstration_over_the_token_budget_is_refused_by_row(sections: dict[str, Any]):
    with pytest.raises(DataError, match=r"have \d+ tokens, over the 12 of a microbatch; raise batching\.max_tokens"):
        check(batching=Batching(max_tokens=12), **sections)
    check(batching=Batching(max_tokens=12, overlong="truncate"), **sections)
    check(batching=Batching(max_tokens=12))


@pytest.mark.parametrize("sections", [{"recipe": "sft"}, {"sft_warmup": SFTWarmup(steps=1)}])
def test_rows_without_a_demonstration_are_refused_where_they_are_trained_on(sections: dict[str, Any]):
    data = DATA.model_copy(update={"completion_column": None})
    with pytest.raises(DataError, match="demonstration"):
        check(data=data, **sections)
    check(data=data)

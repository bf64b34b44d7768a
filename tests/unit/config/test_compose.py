import shlex

import pytest
from omegaconf import OmegaConf

from rlpack.config.compose import base_node, compose, groups
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Config
from rlpack.packing.batching import Batching

CHOICES = [(group, choice) for group, choices in groups().items() for choice in choices]
NEEDED = {
    ("model", "pretrained"): ["model.path=some/model"],
    ("data", "jsonl"): ["data.source=prompts.jsonl", "data.validation_source=held_out.jsonl"],
    ("data", "parquet"): ["data.source=prompts.parquet", "data.validation_source=held_out.parquet"],
    ("data", "hub"): ["data.source=owner/prompts"],
}


def problem_of(*overrides):
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return str(caught.value)


def test_the_base_node_is_the_schema():
    assert Config.model_validate(OmegaConf.to_container(base_node(Config))) == Config()


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_shipped_preset_composes_into_a_valid_config(group, choice):
    compose([f"{group}={choice}", *NEEDED.get((group, choice), [])])


@pytest.mark.parametrize(("group", "choice"), list(NEEDED))
def test_a_preset_that_needs_a_value_says_which(group, choice):
    assert NEEDED[group, choice][0].partition("=")[0] in problem_of(f"{group}={choice}")


@pytest.mark.parametrize("recipe", groups()["recipe"])
@pytest.mark.parametrize("mode", groups()["batching"])
def test_the_recipe_group_sets_the_recipe_key_and_goes_with_every_batching(recipe, mode):
    config = compose([f"recipe={recipe}", f"batching={mode}"])
    # Presets of an algorithm without a loop of its own run GRPO's.
    loop = recipe if recipe in {"sft", "dapo", "ppo", "remax"} else "grpo"
    assert (config.recipe.name, config.batching.mode) == (loop, mode)
    assert (config.sft_warmup.steps > 0) == (recipe != "sft")


def test_the_documented_command_means_what_it_says():
    words = "recipe=grpo data=arithmetic model=tiny batching.mode=packed trainer.steps=50 seed=1"
    config = compose(words.split())
    assert config == compose(["trainer.steps=50"])
    assert (config.trainer.steps, config.batching) == (50, Batching())


def test_users_choose_names_without_a_plus_sign():
    config = compose(
        [
            "roles.judge.target=my_pkg.judge:JudgeWorker",
            "roles.judge.batching.mode=fixed",
            "placement.pools.second.ranks=3",
            "placement.roles.judge=second",
            "model.config.rope_parameters.rope_theta=10000.0",
            "data.generator.noise=0.1",
            "reward.arguments.marker='#'",
        ]
    )
    assert config.roles["judge"].target == "my_pkg.judge:JudgeWorker"
    assert config.roles["actor"].target == "rlpack.workers.actor:ActorWorker"
    assert config.placement.pools["second"].ranks == 3
    assert config.model.config["rope_parameters"] == {"rope_theta": 10000.0}
    assert (config.data.generator, config.reward.arguments) == ({"noise": 0.1}, {"marker": "#"})


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_an_unknown_key_is_refused_however_it_is_written(sign):
    assert "did you mean trainer.steps? trainer has: steps," in problem_of(f"{sign}trainer.stepz=1")
    assert "roles.judge.tarket is not a key; did you mean roles.judge.target?" in problem_of(
        "roles.judge.target=a:B", f"{sign}roles.judge.tarket=c"
    )
    assert "sequence_packing is not a key" in problem_of(f"{sign}sequence_packing=true")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=tinny", "model=tinny is not a choice; did you mean model=tiny? model has: pretrained, small, tiny"),
        ("recipe=PPO", "recipe=PPO is not a choice; did you mean recipe=ppo?"),
        ("experiment=LoRA", "experiment=LoRA is not a choice; did you mean experiment=lora?"),
        ("experiment=[smoke,lorra]", "experiment=lorra is not a choice; did you mean experiment=lora? experiment has:"),
        ("experiment=[smoke,null]", "experiment=null is not a choice; experiment has: eight_bit, lora, smoke"),
        ("experiment=[[smoke]]", "experiment=['smoke'] is not a choice; did you mean experiment=smoke?"),
        ("experiment=[lora,nope]", "experiment=nope is not a choice; experiment has: eight_bit, lora, smoke"),
        ("recipe=null", "recipe=null is not a choice; recipe has: cispo, dapo, dr_grpo, gmpo, grpo, gspo"),
        ("batching=[packed,dynamic]", "has more than one choice; batching takes one of: dynamic, fixed, packed"),
        (
            "trainer.steps=???",
            "trainer.steps is missing; set trainer.steps=… "
            "(number of training steps; each trains on one rollout batch)",
        ),
        ("run_dir=${no.such.key}", "run_dir: "),
        ("run_dir=${run_dir}", "run_dir: "),
        ("run_dir=${oc.env:RLPACK_IS_NOT_SET}", "RLPACK_IS_NOT_SET"),
        (
            "reward.functions=[]",
            "reward.functions=[] is a list, but reward.functions is a section; set one of its keys: ",
        ),
        ("trainer=[1]", "trainer=[1] is a list, but trainer is a section; set one of its keys: trainer.<key>=<value>"),
        ("data.validation_source=", "data.validation_source is '', which is blank; set it, or null for data.source"),
        ("seed", "'seed' is not an override; write key=value"),
        ("a=b=c", "'a=b=c' is not an override; write key=value"),
        ("trainer.steps=\udcff", "is not an override; write key=value"),
        ("seed=" + "9" * 5000, "is not an override; write key=value"),
        ("run_dir=" + "x" * 1_000_000, "has 1000008 characters, over the limit"),
        (
            "trainer.steps=1,2",
            "trainer.steps=1,2 has a comma, but trainer.steps takes one value; add --multirun for one run per value",
        ),
        ("rollout.stop_token_ids=3,4", "stop_token_ids=3,4 has a comma; write 'rollout.stop_token_ids=[3,4]'"),
        (
            "run_dir=a,b",
            "run_dir=a,b has a comma; write 'run_dir=\"a,b\"', or add --multirun for one run per value",
        ),
        ("rollout.vllm=a,b", "rollout.vllm=a,b has a comma, but rollout.vllm has entries; set them one by one"),
        ("recipe=grpo,ppo", "recipe=grpo,ppo has a comma, but recipe takes one value; add --multirun"),
        ("data.sourse=a,b", "did you mean data.source?"),
        ("hydra.foo=1", "Could not override 'hydra.foo'"),
    ],
)
def test_an_override_that_cannot_be_composed_is_one_clear_error(override, message):
    assert message in problem_of(override)


def test_a_second_experiment_is_not_taken_in_the_place_of_the_first():
    with pytest.raises(
        ConfigError,
        match=r"experiment is given 2 times, but only the last would count; write experiment=\[smoke,lora\]",
    ):
        compose(["experiment=smoke", "experiment=lora"])
    both = compose(["experiment=[smoke,lora]"])
    assert both.trainer.steps == 2
    assert both.actor.lora.rank > 0


@pytest.mark.parametrize("value", ["~/x", "/tmp/ünï", "a(1).jsonl"])
def test_a_value_that_hydra_reads_in_quotes_alone_is_shown_in_them(value):
    with pytest.raises(ConfigError, match="is not an override") as caught:
        compose([f"run_dir={value}"])
    hint = str(caught.value).partition("; quote its value, in a shell as ")[2]
    (override,) = shlex.split(hint)
    assert compose([override]).run_dir == value


def test_texts_of_a_list_are_shown_in_the_quotes_that_they_need():
    with pytest.raises(ConfigError, match="is not an override") as caught:
        compose(["actor.lora.targets=[*.[qv]_proj,lm_*]"])
    (override,) = shlex.split(str(caught.value).partition("; quote the texts of a list, in a shell as ")[2])
    assert override == 'actor.lora.targets=["*.[qv]_proj","lm_*"]'


@pytest.mark.parametrize(
    "override", ["seed=\udcff", "seed=[1", "run_dir=~'x", "seed", "actor.lora.targets=[*.[q,v]_p]"]
)
def test_nothing_is_said_of_quotes_that_would_not_help(override):
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert "in a shell" not in str(caught.value)

"""The answers for other frameworks' names hold for today's schema."""

from collections import Counter

import pytest

from rlpack.cli.main import main
from rlpack.config.compose import groups
from rlpack.config.errors import ConfigError
from rlpack.config.foreign_names import ForeignName, foreign_names
from rlpack.config.keys import find, root_key, unknown_key_problem
from rlpack.config.migration_page import PAGE, render
from rlpack.config.recipes import builtin_recipes, builtin_target, sweep_class
from rlpack.config.reference_page import type_text
from rlpack.config.validate import validate

ROOT = root_key(sweep_class([builtin_target(name) for name in builtin_recipes()]))


def stale(target: str) -> bool:
    """Return whether a target names no key, or a value that its key doesn't take."""
    path, has_value, value = target.partition("=")
    if path in groups() and has_value:
        return value not in groups()[path]
    key = find(path, ROOT)
    return key is None or not key.is_leaf or (bool(has_value) and value not in type_text(key).split(", "))


def test_every_answer_is_a_key_of_the_schema_with_a_value_that_it_takes():
    assert [(name.name, target) for name in foreign_names() for target in name.keys if stale(target)] == []


def test_a_stale_answer_is_noticed():
    assert [stale(target) for target in ("batching.max_token", "trainer", "batching.mode=pack", "recipe=grp")] == [
        True
    ] * 4
    assert not any(map(stale, ("batching.max_tokens", "batching.mode=packed", "recipe=gspo", "dapo.max_rounds")))


def test_no_name_hides_a_key_of_ours():
    assert [name.name for name in foreign_names() if find(name.name, ROOT) is not None and name.name != "seed"] == []


def test_the_names_cover_six_frameworks_once_each_and_those_without_a_key_say_why():
    counts = Counter(name.framework for name in foreign_names())
    assert set(counts) == {"verl", "NeMo-RL", "ROLL", "TRL", "OpenRLHF", "Tunix"}
    assert len({name.name for name in foreign_names()}) >= 110
    assert max(Counter((name.framework, name.name) for name in foreign_names()).values()) == 1
    assert [name.name for name in foreign_names() if not name.keys and not name.note] == []


@pytest.mark.parametrize("name", foreign_names(), ids=lambda name: f"{name.framework}-{name.name}")
def test_every_name_is_answered_by_its_own_row(name: ForeignName):
    answer = unknown_key_problem(name.name, ROOT)
    assert answer.startswith(f"{name.name} is not a key; that is ")
    assert f"{name.framework}'s" in answer
    assert all(key in answer for key in name.keys)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "that is verl's name; here it is batching.max_tokens"),
        ("actor_train.max_tokens_per_microbatch_in_train", "that is ROLL's name; here it is batching.max_tokens"),
        (
            "gradient_accumulation_steps",
            "that is ROLL's and TRL's name; there is no such key here: it follows from trainer.mini_batch_size and "
            "batching.max_tokens",
        ),
        ("epsilon_high", "that is TRL's name; here it is algorithm.clip_high"),
        ("num_generations", "that is TRL's name; here it is trainer.group_size"),
        ("trainer.num_generations", "that is TRL's and Tunix's name; here it is trainer.group_size"),
        ("max_steps", "ROLL's and TRL's name; here it is trainer.steps (counts rollout batches, not optimizer"),
        ("output_dir", "that is ROLL's and TRL's name; here it is run_dir"),
        ("run.max_prompt_length", "that is verl's, TRL's and Tunix's name; here it is data.max_prompt_tokens (a"),
        ("a.temperature", "that is verl's, NeMo-RL's, TRL's and Tunix's name; here it is rollout.temperature"),
        ("kl_ctrl.target_kl", "verl's and ROLL's name; here it is algorithm.kl_target (in nats per response, not"),
        ("ppo_max_token_len_per_gpu", "the top level has: recipe,"),  # the actor's, or the critic's
        ("placement.pools.big.rank", "did you mean placement.pools.big.ranks?"),  # not the rank of an adapter
        ("trainer.beta", "that is TRL's and Tunix's name; here it is algorithm.kl_coef"),  # no key of trainer is nearer
        ("actor.optimizer.beta", "did you mean actor.optimizer.beta2?"),
        ("trainer.max_token", "did you mean judge.max_tokens?"),
        ("actor.paralel.tp", "did you mean actor.parallel.tp?"),
        ("trainr.steps", "did you mean trainer.steps?"),  # not OpenRLHF's name
        ("trainer.epoch", "trainer has: steps,"),
    ],
)
def test_a_name_is_matched_by_its_path_or_by_its_last_part_where_no_key_of_ours_is_nearer(path, answer):
    assert answer in unknown_key_problem(path)


@pytest.mark.parametrize(
    "name",
    [
        *("max_steps", "output_dir", "save_steps", "max_prompt_length", "temperature", "top_p", "weight_decay"),
        *("max_grad_norm", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "report_to", "reward_funcs"),
        *("vllm_mode", "vllm_importance_sampling_mode", "save_total_limit", "dataset_name"),
    ],
)
def test_names_that_users_of_trl_write_first_are_answered(name):
    assert f"{name} is not a key; that is " in (answer := unknown_key_problem(name))
    assert "TRL's name; here it is " in answer


@pytest.mark.parametrize("name", ["scale_rewards", "use_vllm", "importance_sampling_level", "report_to", "vllm_mode"])
def test_names_of_trl_whose_values_differ_list_the_values(name):
    (answer,) = (each for each in foreign_names() if (each.framework, each.name) == ("TRL", name))
    assert "→" in answer.note or "=" in answer.note


def test_a_section_of_another_framework_is_answered_key_by_key():
    actor = {"ppo_epochs": 2, "clip_ratio_low": 0.2, "nothing_known": 1}
    with pytest.raises(ConfigError) as caught:
        validate({"model": {"config": {"model_type": "qwen2"}}, "actor_rollout_ref": {"actor": actor}})
    assert caught.value.problems == [
        "actor_rollout_ref.actor.ppo_epochs is not a key; that is verl's name; here it is trainer.updates_per_batch",
        "actor_rollout_ref.actor.clip_ratio_low is not a key; that is verl's name; here it is algorithm.clip_low",
    ]


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_the_command_line_answers(sign, capsys):
    assert main(["train", f"{sign}policy.sequence_packing.train_mb_tokens=4096"]) == 2
    assert capsys.readouterr().err == (
        "rlpack train: policy.sequence_packing.train_mb_tokens is not a key; that is NeMo-RL's name; here it is "
        "batching.max_tokens\n"
    )


@pytest.mark.parametrize("sign", ["", "+"])
@pytest.mark.parametrize(
    "override", ["actor_rollout_ref={actor: {ppo_epochs: 2}}", "actor_rollout_ref.actor={ppo_epochs: 2}"]
)
def test_the_command_line_answers_a_whole_section(sign, override, capsys):
    assert main(["train", f"{sign}{override}"]) == 2
    assert capsys.readouterr().err == (
        "rlpack train: actor_rollout_ref.actor.ppo_epochs is not a key; that is verl's name; here it is "
        "trainer.updates_per_batch\n"
    )


def test_the_migration_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m rlpack.config.migration_page"

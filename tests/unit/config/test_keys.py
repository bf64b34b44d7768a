import pytest

from rlpack.config.foreign_names import foreign_answer
from rlpack.config.keys import find, unknown_key_problem, walk
from rlpack.config.usual_names import USUAL_NAMES

# Sections that only those read who choose the recipe, the role or the command that they belong to.
CHOSEN = (
    *(
        "actor.forward_batching.",
        "actor.lora.",
        "actor.moe.",
        "actor.parallel.",
        "algorithm.correction.",
        "critic.",
        "dapo.",
        "job.",
        "judge.",
    ),
    *("reference.", "reward_model.", "trainer.late_groups."),
)


def test_what_everybody_reads_stays_within_a_budget_of_130_keys_and_a_chosen_section_within_32():
    keys = [key.path for key in walk() if key.is_leaf and "<name>" not in key.path]
    assert len([path for path in keys if not path.startswith(CHOSEN)]) <= 130
    for section in CHOSEN:  # layouts and batching of roles that inherit the actor's are choices of their own
        inherited = tuple(f"{section}{name}." for name in ("parallel", "batching", "forward_batching"))
        assert len([path for path in keys if path.startswith(section) and not path.startswith(inherited)]) <= 32


def test_every_key_says_what_it_means():
    inherited = "reference.batching."
    assert [key.path for key in walk() if key.is_leaf and not key.description and "batching." not in key.path] == []
    assert find(inherited + "micro_batch_size") is not None


@pytest.mark.parametrize(
    "path", ["seed", "actor.optimizer.beta1", "model.config.a.b", "roles.judge.batching.micro_batch_size"]
)
def test_a_key_that_exists_is_found(path):
    assert find(path) is not None


@pytest.mark.parametrize(
    "path", ["sed", "actor.optimiser.beta1", "seed.low", "roles.judge.rows", "placement.pools.a.b"]
)
def test_a_key_that_does_not_exist_is_not_found(path):
    assert find(path) is None


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("trainer.stepz", "trainer.steps"),
        ("steps", "trainer.steps"),
        ("actor.optimizer.learning_rat", "actor.optimizer.learning_rate"),
        ("placement.pools.big.rank", "placement.pools.big.ranks"),
        ("modle", "model"),
        ("trainer.learning_rate", "actor.optimizer.learning_rate"),
        ("actor.learning_rate", "actor.optimizer.learning_rate"),
        ("critic.learning_rate", "critic.optimizer.learning_rate"),
        ("lr", "actor.optimizer.learning_rate"),
        ("data.path", "data.source"),
        ("data.train_file", "data.source"),
        ("model.name", "model.path"),
        ("trainer.epochs", "trainer.data_epochs"),
        ("trainer.num_epochs", "trainer.data_epochs"),
        ("algorithm.kl", "algorithm.kl_coef"),
        ("gpus", "placement.pools.main.ranks"),
    ],
)
def test_the_message_names_the_nearest_key(path, nearest):
    assert f"did you mean {nearest}?" in unknown_key_problem(path)


def test_usual_names_are_no_keys_and_are_answered_by_keys_that_no_other_framework_answers():
    for name, (key, _) in USUAL_NAMES.items():
        assert (find(name), find(key) is None, foreign_answer(name)) == (None, False, ""), name
        assert f"did you mean {key}?" in unknown_key_problem(name)
    assert "did you mean trainer.data_epochs? (passes over" in unknown_key_problem("epochs")


def test_the_message_lists_the_valid_keys_beside_the_wrong_one():
    assert unknown_key_problem("checkpoint.xyz").endswith("checkpoint has: every, keep, asynchronous")


def test_a_key_below_a_value_is_named_as_such():
    assert unknown_key_problem("seed.x") == "seed.x is not a key; seed is a value and has no keys below it"

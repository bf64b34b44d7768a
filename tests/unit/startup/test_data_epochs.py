"""The length of a run in passes over the data, and the share of the data that it uses."""

from typing import Any

import numpy as np
import pytest

from rlpack.config.errors import ConfigError
from rlpack.config.schema import Actor, Config, Data, Optimizer, Trainer
from rlpack.config.validate import validate
from rlpack.recipes.driver.learning_rate import learning_rate
from rlpack.recipes.driver.splits import load_splits
from rlpack.startup.data_epochs import with_steps
from rlpack.startup.same_run import check_steps
from tests.builders import tiny_config


@pytest.mark.parametrize(
    ("epochs", "prompts", "per_step", "steps"),
    [(1, 64, 8, 8), (1, 65, 8, 9), (3, 10, 4, 8), (0.5, 64, 8, 4), (0.1, 1000, 100, 1), (0.3, 10, 1, 3), (2, 1, 1, 2)],
)
def test_steps_cover_the_passes_and_no_more(epochs: float, prompts: int, per_step: int, steps: int):
    config = tiny_config(trainer=Trainer(data_epochs=epochs, prompts_per_step=per_step))
    resolved = with_steps(config, prompts).trainer
    assert (resolved.steps, resolved.data_epochs, resolved.known_steps) == (steps, None, steps)


def test_without_passes_the_configuration_stays():
    config = tiny_config()
    assert with_steps(config, 10) is config


def test_keys_that_depend_on_the_steps_are_checked_once_these_are_known():
    actor = {"optimizer": {"warmup_steps": 60}}
    model = {"model": {"config": {"model_type": "qwen2"}}, "actor": actor}
    with pytest.raises(ConfigError, match=r"leaves no step of trainer\.steps \(50\) at peak rate"):
        validate(model)
    config = validate(model | {"trainer": {"data_epochs": 2, "prompts_per_step": 10}})
    assert with_steps(config, 1000).trainer.steps == 200
    with pytest.raises(ConfigError, match=r"trainer\.data_epochs=2 over 300 prompts is trainer\.steps=60: .*peak rate"):
        with_steps(config, 300)


def test_a_resumed_run_may_not_have_done_more_steps_than_its_passes_take():
    config = tiny_config(trainer=Trainer(data_epochs=2, prompts_per_step=10))
    done = {"phase": "train", "step": 21}
    check_steps(done, config)  # not known before the data is read
    with pytest.raises(ConfigError, match=r"trainer\.steps is 20, but the run in run_dir=.* has done 21 steps"):
        check_steps(done, with_steps(config, 100))
    with pytest.raises(ConfigError, match=r"data_epochs is 2, which is 20 steps, .* 21 steps; raise trainer\.data_epo"):
        check_steps(done, with_steps(config, 100), 2.0)


@pytest.mark.parametrize("value", [0, -1, "many", True])
def test_a_number_of_passes_is_above_0(value: Any):
    with pytest.raises(ConfigError, match=r"trainer\.data_epochs"):
        validate({"model": {"config": {"model_type": "qwen2"}}, "trainer": {"data_epochs": value}})


def splits(fraction: float, seed: int = 3) -> tuple[list[str], int, int]:
    """Return the names of the training prompts, and the sizes of the held-out split and of the vocabulary."""
    data = Data(generator={"train_size": 40, "validation_size": 5}, fraction=fraction)
    config: Config = tiny_config(data=data, seed=seed)
    tokenizer, train, held_out = load_splits(config)
    return [example.uid for example in train.examples], len(held_out), len(tokenizer)


def test_a_fraction_leaves_a_seeded_share_of_the_training_prompts_alone():
    (whole, *others), (half, *same), (tenth, *_) = splits(1.0), splits(0.5), splits(0.1)
    assert (len(whole), len(half), len(tenth)) == (40, 20, 4)
    assert set(tenth) < set(half) < set(whole)
    assert half == [uid for uid in whole if uid in set(half)]  # in their order
    assert others == same
    assert half != whole[:20]
    assert splits(0.5)[0] == half
    assert len(splits(0.001)[0]) == 1


@pytest.mark.parametrize("value", [0, 1.5, -0.5, "half"])
def test_a_fraction_is_above_0_and_at_most_1(value: Any):
    with pytest.raises(ConfigError, match=r"data\.fraction"):
        validate({"model": {"config": {"model_type": "qwen2"}}, "data": {"fraction": value}})


@pytest.mark.parametrize(
    "trainer",
    [
        Trainer(shuffle_mini_batches=True),
        Trainer(updates_per_batch=2),
        Trainer(updates_per_batch=2, prompts_per_step=4, group_size=2, mini_batch_size=8),  # one mini-batch
    ],
)
def test_shuffling_needs_several_passes_and_mini_batches(trainer: Trainer):
    values = trainer.model_dump() | {"shuffle_mini_batches": True}
    with pytest.raises(ConfigError, match=r"shuffle_mini_batches is true, but trainer\..* nothing to shuffle"):
        validate({"model": {"config": {"model_type": "qwen2"}}, "trainer": values})


def test_a_schedule_spans_the_passes():
    optimizer = Optimizer(learning_rate=1.0, schedule="linear")
    config = tiny_config(actor=Actor(optimizer=optimizer), trainer=Trainer(data_epochs=1, prompts_per_step=4))
    steps = with_steps(config, 40).trainer.steps
    rates = [learning_rate(optimizer, step, steps) for step in range(1, steps + 1)]
    assert np.allclose(rates, np.linspace(1, 0.1, 10))

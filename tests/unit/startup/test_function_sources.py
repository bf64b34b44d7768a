import inspect
import sys

import pytest

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.registry import ADVANTAGES, LOSSES, find_loss
from rlpack.config.schema import Algorithm, Config, Role, builtin_roles
from rlpack.startup.function_sources import _built_in, check_function_sources, parameters_of

# What may have the parameters, or can't be told without importing it.
POSSIBLE = {
    "a loss": "def f(tokens): ...",
    "settings by name": "def f(tokens, *, clip_low, clip_high, dual_clip=None, statistics): ...",
    "any setting": "def f(tokens, **settings): ...",
    "one that is made": "f = object()",
    "one with a decorator": "import mine_too\n@mine_too.with_statistics\ndef f(tokens, taper): ...",
    "one of two": "def f(tokens, taper): ...\ndef f(tokens): ...",
    "one in a branch": "if True:\n    def f(tokens, taper): ...",
    "one of another module": "from mine_too import f",
    "names of another module": "from mine_too import *\n",
    "a name in the namespace": "globals()['f'] = object\n",
}


@pytest.mark.parametrize("function", [*LOSSES.values(), *ADVANTAGES.values()])
def test_the_source_of_a_built_in_function_has_the_parameters_of_the_function(function):
    read = parameters_of(_built_in(function.__name__).args)
    true = list(inspect.signature(function).parameters.values())
    assert [(one.name, one.kind) for one in read] == [(one.name, one.kind) for one in true]
    assert [one.default is one.empty for one in read] == [one.default is one.empty for one in true]


@pytest.mark.parametrize("name", POSSIBLE)
def test_a_function_that_may_be_right_is_left_to_its_import(tmp_path, monkeypatch, name):
    (tmp_path / "a_loss.py").write_text(POSSIBLE[name])
    monkeypatch.syspath_prepend(tmp_path)
    check_function_sources(Config(algorithm=Algorithm(loss="a_loss:f")))


@pytest.mark.parametrize(
    ("source", "arguments"),
    [("def f(tokens, taper): ...", {}), ("def f(tokens): ...", {"taper": 1}), ("def g(tokens): ...", {})],
)
def test_a_function_that_is_certainly_wrong_is_refused_as_after_its_import(tmp_path, monkeypatch, source, arguments):
    (tmp_path / "a_wrong_loss.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    settings = Algorithm(loss="a_wrong_loss:f", loss_arguments=arguments)
    with pytest.raises(AlgorithmError) as early:
        check_function_sources(Config(algorithm=settings))
    with pytest.raises(AlgorithmError) as late:
        find_loss(settings.loss, arguments, dict(settings))
    assert str(early.value) == str(late.value)
    sys.modules.pop("a_wrong_loss")


def test_arguments_of_an_advantage_are_checked_though_a_role_may_add_columns(tmp_path, monkeypatch):
    (tmp_path / "a_scaled_advantage.py").write_text("def f(rewards, bonus, factor=1.0): ...")
    monkeypatch.syspath_prepend(tmp_path)
    roles = builtin_roles() | {"mine": Role(target="my_package.roles:Mine")}
    settings = Algorithm(advantage="a_scaled_advantage:f", advantage_arguments={"factor": 2.0})
    check_function_sources(Config(algorithm=settings, roles=roles))
    settings = Algorithm(advantage="a_scaled_advantage:f", advantage_arguments={"factro": 2.0})
    with pytest.raises(AlgorithmError, match="factro is not a parameter of the function that can be set; those are"):
        check_function_sources(Config(algorithm=settings, roles=roles))


def test_an_argument_of_an_advantage_cannot_replace_a_column():
    settings = Algorithm(advantage="rloo", advantage_arguments={"rewards": 2.0})
    with pytest.raises(AlgorithmError, match="rewards would replace the column 'rewards' of the batch; remove it"):
        check_function_sources(Config(algorithm=settings))


def test_a_judge_in_place_of_the_reward_functions_may_add_any_column(tmp_path, monkeypatch):
    (tmp_path / "an_advantage.py").write_text("def f(rewards, reward_of_style): ...")
    monkeypatch.syspath_prepend(tmp_path)
    settings = Algorithm(advantage="an_advantage:f")
    with pytest.raises(AlgorithmError, match="reward_of_style"):
        check_function_sources(Config(algorithm=settings))
    roles = builtin_roles() | {"reward": Role(target="rlpack.workers.judge:JudgeWorker")}
    check_function_sources(Config(algorithm=settings, roles=roles))

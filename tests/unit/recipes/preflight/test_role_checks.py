"""A role's class that no rank could build or call is refused by its key before anything starts."""

from typing import Any, Self

import pytest

from rlpack.config.schema import Role, builtin_roles
from rlpack.distributed.errors import PlacementError
from rlpack.recipes.preflight.role_checks import check_role
from rlpack.worker import RankContext, Trainable, Worker, broadcast, sharded
from rlpack.workers.actor import ActorWorker
from rlpack.workers.rollout import RolloutWorker
from rlpack.workers.stepped_role import SteppedRole
from tests.builders import tiny_config, tiny_tokenizer


class Plain(Worker):
    @sharded()
    def score(self, shard: Any) -> Any: ...


class Weighted(Plain):
    def __init__(self, context: Any, weight: float, *, name: str = "") -> None:
        super().__init__(context)


class Configured(Plain):
    @classmethod
    def from_settings(cls, context: Any, config: Any, tokenizer: Any, *, n: int = 2) -> Self: ...


class Named(Plain):
    """Has arguments with the names of parameters of `from_settings`."""

    def __init__(self, context: Any, tokenizer: str, config: str) -> None:
        super().__init__(context)
        self.given = (tokenizer, config)


def logged(method: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


class Logged(Worker):
    @sharded()
    @logged
    def revise(self, shard: Any) -> Any: ...


class Mute(Worker): ...


class Undecorated(Worker):
    def score(self, shard: Any) -> Any: ...


class Shouting(Worker):
    @broadcast
    def score(self, shard: Any) -> Any: ...


class Merging(Worker):
    @sharded(merge=sum)
    def score(self, shard: Any) -> Any: ...


class Waiting(Worker):
    @sharded()
    async def score(self, shard: Any) -> Any: ...


class Yielding(Worker):
    @sharded()
    def score(self, shard: Any) -> Any:
        yield shard


class Blind(Worker):
    @sharded()
    def score(self) -> Any: ...


class Demanding(Worker):
    @sharded()
    def score(self, shard: Any, level: int) -> Any: ...


class Unbound(Plain):
    def from_settings(self, context: Any, config: Any, tokenizer: Any) -> Any: ...


class Narrow(Plain):
    @classmethod
    def from_settings(cls, context: Any) -> Self: ...


class Contextless(Plain):
    def __init__(self) -> None: ...


class Foreign: ...


class Stand(RolloutWorker):
    @classmethod
    def from_settings(cls, context: Any, config: Any, tokenizer: Any) -> Self: ...


# All methods of the actor, in a class that no session would save.
_METHODS = vars(SteppedRole) | vars(ActorWorker)
Unsaved = type("Unsaved", (Worker,), {n: m for n, m in _METHODS.items() if not n.startswith("__")})


class Tracker(Worker, Trainable):
    """A recipe's own role, trained, which scores nothing."""

    @broadcast
    def save(self, folder: str) -> None: ...

    @broadcast
    def load(self, folder: str) -> None: ...

    @broadcast
    def export_model(self, folder: str) -> None: ...


class Half(Worker, Trainable):
    @broadcast
    def save(self, folder: str) -> None: ...


class Called(Worker):
    @broadcast
    def save(self, folder: str) -> None: ...


def check(kind: str, /, key: str = "judge", **arguments: Any) -> None:
    check_role(key, Role(target=f"{__name__}:{kind}", arguments=arguments))


def check_own(kind: str, *, is_trained: bool) -> None:
    check_role("tracker", Role(target=f"{__name__}:{kind}"), is_own=True, is_trained=is_trained)


def test_classes_that_ranks_can_build_and_call_pass():
    check("Plain")
    check("Weighted", weight=0.5)
    check("Weighted", weight=0.5, name="a")
    check("Configured", n=3)
    check("Plain", key="reward")
    check("Stand", key="rollout")
    for name, role in builtin_roles().items():
        check_role(name, role)


def test_an_argument_of_a_role_may_have_any_name():
    check("Named", tokenizer="t5", config="base")
    role = Named.from_settings(RankContext(), tiny_config(), tiny_tokenizer(), tokenizer="t5", config="base")
    assert role.given == ("t5", "base")


def test_a_recipes_role_whose_method_lost_its_name_is_refused():
    with pytest.raises(
        PlacementError, match=r"Logged.*its method revise is named 'wrapper'.*functools\.wraps\(method\)"
    ):
        check_own("Logged", is_trained=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Absent", r"roles\.judge\.target: role target .* has no class Absent; it has .*Blind"),
        ("Foreign", "which has no method from_settings; a custom role derives from rlpack.worker.Worker"),
        ("Mute", r"roles\.judge\.target is '.*:Mute', which has no method score; a custom role derives"),
        ("Undecorated", r"Undecorated\.score has no dispatch decorator; add @sharded\(\)"),
        ("Shouting", "whose score is broadcast"),
        ("Merging", "whose score has a merge, but rewards are restored by rows"),
        ("Waiting", "whose score is a coroutine; write it without async"),
        ("Yielding", "whose score is a generator; write it without async and yield"),
        ("Blind", "whose score can't be called with a shard: too many positional arguments; a custom role"),
        ("Demanding", "whose score can't be called with a shard: missing a required argument: 'level'"),
        ("Unbound", "whose from_settings is not a class method; write it as `@classmethod def from_settings"),
        ("Narrow", "whose from_settings can't be called with context, config, tokenizer: too many positional"),
        ("Contextless", "whose __init__ can't be called with context: too many positional arguments; take the context"),
    ],
)  # fmt: skip
def test_a_role_that_no_session_could_build_or_call_is_refused_by_its_key(name: str, message: str):
    with pytest.raises(PlacementError, match=message):
        check(name)


def test_a_class_in_the_place_of_a_trained_role_has_to_be_one_that_is_saved():
    unsaved = Role(target=f"{__name__}:Unsaved")
    with pytest.raises(
        PlacementError, match=r"role actor, but Unsaved does not derive from rlpack\.worker\.Trainable,"
    ):
        check_role("actor", unsaved, is_trained=True)


def test_a_role_of_the_recipe_needs_a_method_to_call_and_no_score():
    check_own("Called", is_trained=False)
    check_own("Tracker", is_trained=True)
    for name, message in (
        ("Mute", "has no method that a recipe can call; decorate one with @sharded, @broadcast or @rank_zero"),
        ("Foreign", "has no method from_settings; derive it from rlpack.worker.Worker"),
    ):
        with pytest.raises(PlacementError, match=rf"roles\.tracker\.target is .*:{name}', which {message}"):
            check_own(name, is_trained=False)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("Half", "does not define export_model, load; derive from"),
        ("Called", "does not derive from rlpack.worker.Trainable and has no decorated method export_model, load, so"),
    ],
)
def test_a_trained_role_that_is_no_trainable_is_refused_with_what_it_lacks(name: str, missing: str):
    message = rf"roles\.tracker\.target is '.*:{name}'; the recipe trains the role tracker, but {name} {missing}"
    with pytest.raises(PlacementError, match=message):
        check_own(name, is_trained=True)


def test_a_trainable_that_the_recipe_does_not_train_gives_a_warning(caplog: pytest.LogCaptureFixture):
    check_own("Tracker", is_trained=True)
    assert not caplog.records
    check_own("Tracker", is_trained=False)
    assert "the recipe doesn't train the role tracker: checkpoints don't hold it" in caplog.text


def test_arguments_that_the_class_does_not_take_or_lacks_are_named_with_those_it_takes():
    with pytest.raises(PlacementError, match=r"roles\.judge\.arguments \(none\): missing .* 'weight'; it takes"):
        check("Weighted")
    with pytest.raises(
        PlacementError, match=r"__init__ can't .*\(weight, wieght\): got an unexpected .* 'wieght'.*weight: "
    ):
        check("Weighted", weight=1.0, wieght=2.0)
    with pytest.raises(PlacementError, match=r"roles\.judge\.arguments \(m\): .*; it takes n: int = 2"):
        check("Configured", m=3)
    with pytest.raises(PlacementError, match=r"roles\.judge\.arguments \(weight\): .*; it takes no arguments"):
        check("Plain", weight=1.0)
    with pytest.raises(PlacementError, match=r"roles\.actor\.target .*from_settings can't be called with roles\.actor"):
        check_role("actor", builtin_roles()["actor"].model_copy(update={"arguments": {"weight": 1.0}}))


def test_an_argument_of_another_type_than_annotated_is_named_with_its_value():
    message = r"__init__ can't be called with roles\.judge\.arguments\.weight='heavy'; it takes weight: float$"
    with pytest.raises(PlacementError, match=message):
        check("Weighted", weight="heavy")
    with pytest.raises(PlacementError, match=r"from_settings can't .*arguments\.n=\[2\]; it takes n: int = 2$"):
        check("Configured", n=[2])
    for weight in (1, 0.5):
        check("Weighted", weight=weight)


def test_a_class_in_the_place_of_a_built_in_role_needs_to_be_built_too():
    with pytest.raises(
        PlacementError, match=r"roles\.rollout\.target .* has no method from_settings; write it as `@cl"
    ):
        check("Foreign", key="rollout")
    with pytest.raises(PlacementError, match=r"roles\.reward\.target is '.*:Mute', which has no method score"):
        check("Mute", key="reward")
    with pytest.raises(
        PlacementError,
        match=r"no decorated method \w+; a replacement of RolloutWorker needs .*generate.*: derive from it",
    ):
        check("Mute", key="rollout")

import pytest

from rlpack.distributed.dispatch import Dispatch, broadcast, dispatch_of, rank_zero, sharded
from rlpack.workers.actor import ActorWorker


class Role:
    @sharded(mini_batches=True, merge=sum)
    def count(self, shard: list[int]) -> int:
        """Count."""
        return len(shard)

    @broadcast
    def shout(self, text: str) -> str:
        return text.upper()

    @rank_zero
    def whisper(self, text: str) -> str:
        return text.lower()

    def mute(self) -> None: ...


class Derived(Role): ...


class Parentheses:
    """Has the decorators' other forms."""

    @sharded
    def count(self, shard: list[int]) -> int:
        """Count."""
        return len(shard)

    @broadcast()
    def shout(self, text: str) -> str:
        return text.upper()

    @rank_zero()
    def whisper(self, text: str) -> str:
        return text.lower()


def test_decorators_note_how_a_method_is_called():
    assert dispatch_of(Role.count) == Dispatch("sharded", mini_batches=True, merge=sum)
    assert dispatch_of(Role.shout) == Dispatch("broadcast")
    assert dispatch_of(Role.whisper) == Dispatch("rank_zero")
    assert dispatch_of(Derived.shout) == Dispatch("broadcast")


def test_parentheses_without_arguments_are_optional():
    assert dispatch_of(Parentheses.count) == dispatch_of(sharded()(lambda shard: shard)) == Dispatch("sharded")
    assert dispatch_of(Parentheses.shout) == Dispatch("broadcast")
    assert dispatch_of(Parentheses.whisper) == Dispatch("rank_zero")
    role = Parentheses()
    assert (role.count([1, 2]), role.shout("a"), role.whisper("A")) == (2, "A", "a")
    assert (Parentheses.count.__name__, Parentheses.count.__doc__) == ("count", "Count.")


def test_columns_by_position_are_refused():
    with pytest.raises(TypeError, match=r"@sharded\('completion'\) .*; write @sharded\(reads='completion'\)"):
        sharded("completion")  # pyright: ignore[reportArgumentType, reportCallIssue]

    def columns_of(factor: int) -> list[str]:
        return ["completion"] * factor

    with pytest.raises(TypeError, match=r"@sharded\(columns_of\) .*; write @sharded\(reads=columns_of\)"):
        sharded(columns_of)


def test_a_decorated_method_is_plain_python_when_called_directly():
    assert (Role().count([1, 2]), Role().shout("a"), Role().whisper("A")) == (2, "A", "a")
    assert (Role.count.__name__, Role.count.__doc__) == ("count", "Count.")


def test_a_method_without_a_decorator_is_refused_and_says_which_there_are():
    with pytest.raises(TypeError, match=r"Role\.mute has no dispatch decorator; add @sharded\(\)"):
        dispatch_of(Role.mute)


def test_old_logprobs_share_their_microbatches_with_the_update():
    assert dispatch_of(ActorWorker.logprobs).mini_batches == dispatch_of(ActorWorker.train_step).mini_batches is True

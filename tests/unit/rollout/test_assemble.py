import pytest
import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.assemble import assemble
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import Generations, Segment, Trajectory, TrajectoryBatch


def generations(rows, logprobs, versions=None):
    versions = versions or [[4] * len(row) for row in rows]
    return Generations(
        token_ids=Ragged.from_rows(rows, torch.int64),
        logprobs=Ragged.from_rows(logprobs, torch.float32),
        policy_versions=Ragged.from_rows(versions, torch.int32),
        finish_reasons=["length"] * len(rows),
    )


def rows_of(batch, name):
    return [row.tolist() for row in batch[name].rows()]


def prompt(*tokens, source="prompt"):
    return Segment(torch.tensor(tokens, dtype=torch.int64), source)


def sampled(tokens, logprobs, version):
    versions = torch.full((len(tokens),), version, dtype=torch.int32)
    return Segment(torch.tensor(tokens, dtype=torch.int64), "policy", torch.tensor(logprobs), versions)


def test_rows_are_prompts_followed_by_responses_with_every_column_aligned():
    prompts = Ragged.from_rows([[5, 6], [7], [8, 9, 9]], torch.int64)
    responses = generations([[1, 6], [], [2]], [[-0.5, -1.0], [], [-2.0]], [[3, 4], [], [4]])
    batch = assemble(
        TrajectoryBatch.single_turn(prompts, responses),
        group_ids=torch.tensor([3, 3, 4]),
        uids=["a", "a", "b"],
        vocab_size=10,
    )
    assert rows_of(batch, "input_ids") == [[5, 6, 1, 6], [7], [8, 9, 9, 2]]
    assert rows_of(batch, "response_mask") == [[False, False, True, True], [False], [False, False, False, True]]
    assert rows_of(batch, "rollout_logprobs") == [[0, 0, -0.5, -1.0], [0], [0, 0, 0, -2.0]]
    assert rows_of(batch, "policy_version") == [[-1, -1, 3, 4], [-1], [-1, -1, -1, 4]]
    assert batch["oldest_version"].tolist() == [3, -1, 4]
    assert rows_of(batch, "version_counts") == [[[3, 1], [4, 1]], [], [[4, 1]]]
    assert batch["prompt_lengths"].tolist() == [2, 1, 3]
    assert batch["response_lengths"].tolist() == [2, 0, 1]
    assert batch["group_ids"].tolist() == [3, 3, 4]
    assert batch["finish_reason"] == ["length"] * 3
    assert batch["uid"] == ["a", "a", "b"]


def test_several_sampled_segments_train_and_what_is_between_them_does_not():
    turns = Trajectory(
        (
            prompt(5, 6),
            sampled([1, 2, 3], [-0.5, -1.0, -1.5], version=7),
            prompt(8, 8, source="calculator"),
            sampled([4], [-2.0], version=9),
        ),
        "stop",
    )
    begins_sampled = Trajectory((sampled([9], [-0.25], version=1), prompt(3, source="user")), "length")
    only_given = Trajectory((prompt(2), prompt(2, 2, source="user")), "length")
    batch = assemble(
        TrajectoryBatch.from_trajectories([turns, begins_sampled, only_given]),
        group_ids=torch.tensor([0, 1, 2]),
        uids=["a", "b", "c"],
    )
    assert rows_of(batch, "input_ids") == [[5, 6, 1, 2, 3, 8, 8, 4], [9, 3], [2, 2, 2]]
    assert [[int(flag) for flag in row] for row in rows_of(batch, "response_mask")] == [
        [0, 0, 1, 1, 1, 0, 0, 1],
        [1, 0],
        [0, 0, 0],
    ]
    assert rows_of(batch, "rollout_logprobs") == [[0, 0, -0.5, -1.0, -1.5, 0, 0, -2.0], [-0.25, 0], [0, 0, 0]]
    assert rows_of(batch, "policy_version") == [[-1, -1, 7, 7, 7, -1, -1, 9], [1, -1], [-1, -1, -1]]
    assert batch["prompt_lengths"].tolist() == [2, 0, 3]
    assert batch["response_lengths"].tolist() == [4, 1, 0]
    assert batch["finish_reason"] == ["stop", "length", "length"]


def test_single_turns_are_the_same_rows_as_trajectories_of_two_segments():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 5, (20, 2), generator=generator).tolist()
    tokens = [[torch.randint(0, 9, (count,), generator=generator) for count in row] for row in lengths]
    logprobs = [-torch.rand(count, generator=generator) for _, count in lengths]
    versions = [torch.full((count,), row, dtype=torch.int32) for row, (_, count) in enumerate(lengths)]
    responses = Generations(
        Ragged.from_rows([response for _, response in tokens]),
        Ragged.from_rows(logprobs),
        Ragged.from_rows(versions),
        ["stop"] * 20,
    )
    columns = TrajectoryBatch.single_turn(Ragged.from_rows([given for given, _ in tokens]), responses)
    one_by_one = TrajectoryBatch.from_trajectories(
        [
            Trajectory((Segment(given, "prompt"), Segment(response, "policy", logprobs[row], versions[row])), "stop")
            for row, (given, response) in enumerate(tokens)
        ]
    )
    ids, uids = torch.arange(20), [str(row) for row in range(20)]
    first, second = (assemble(batch, group_ids=ids, uids=uids) for batch in (columns, one_by_one))
    assert list(first) == list(second)
    assert all(rows_of(first, name) == rows_of(second, name) for name in first.names_of("per-token"))
    assert first["prompt_lengths"].equal(second["prompt_lengths"])


def test_no_rows_make_an_empty_batch():
    empty = torch.zeros(0, dtype=torch.int64)
    single_turn = TrajectoryBatch.single_turn(Ragged.from_rows([], torch.int64), generations([], []))
    for trajectories in (single_turn, TrajectoryBatch.from_trajectories([])):
        batch = assemble(trajectories, group_ids=empty, uids=[], vocab_size=3)
        assert batch.num_rows == 0
        assert batch["policy_version"].values.dtype == torch.int32
        assert (batch["oldest_version"].shape, batch["version_counts"].values.shape) == ((0,), (0, 2))


@pytest.mark.parametrize(
    ("tokens", "logprobs", "text"),
    [
        ([[1], [10]], [[-1.0], [-1.0]], r"token id 10 in segment 1 \(policy\) of row 1; it has to be from 0 to 9"),
        ([[-1], [1]], [[-1.0], [-1.0]], r"token id -1 in segment 1 \(policy\) of row 0"),
        ([[1], [1, 1]], [[-1.0], [-1.0, float("nan")]], r"log-prob nan in segment 1 \(policy\) of row 1"),
        ([[1], [1]], [[-1.0], [float("-inf")]], r"log-prob -inf in segment 1 \(policy\) of row 1"),
        ([[1], [1]], [[0.5], [-1.0]], r"log-prob 0.5 in segment 1 \(policy\) of row 0"),
        ([[1]], [[-1.0]], "1 responses for 2 prompts"),
    ],
)
def test_values_that_no_model_returns_are_refused_by_row(tokens, logprobs, text):
    prompts = Ragged.from_rows([[1], [2]], torch.int64)
    with pytest.raises(EngineError, match=text):
        assemble(
            TrajectoryBatch.single_turn(prompts, generations(tokens, logprobs)),
            group_ids=torch.tensor([0, 1]),
            uids=["a", "b"],
            vocab_size=10,
        )


@pytest.mark.parametrize(("version", "newest"), [(5, 4), (-1, 4), (-1, None)])
def test_a_version_that_was_not_published_yet_is_refused_by_row(version, newest):
    prompts = Ragged.from_rows([[1], [2]], torch.int64)
    responses = generations([[1], [3, 4]], [[-1.0], [-1.0, -1.0]], [[4], [4, version]])
    with pytest.raises(EngineError, match=rf"policy version {version} in segment 1 \(policy\) of row 1; it has to be"):
        assemble(
            TrajectoryBatch.single_turn(prompts, responses),
            group_ids=torch.tensor([0, 1]),
            uids=["a", "b"],
            policy_version=newest,
        )


@pytest.mark.parametrize("reason", ["abort", "", None])
def test_an_unknown_finish_reason_is_refused_by_row(reason):
    made = generations([[1], [2]], [[-1.0], [-1.0]])
    message = f"row 1 has the finish reason {reason!r}; it has to be stop or length"
    with pytest.raises(EngineError, match=message):
        Generations(made.token_ids, made.logprobs, made.policy_versions, ["stop", reason])
    turns = [Trajectory((prompt(1),), "stop"), Trajectory((prompt(1),), reason)]
    with pytest.raises(EngineError, match=message):
        TrajectoryBatch.from_trajectories(turns)


def test_a_given_token_outside_the_vocabulary_is_refused_by_its_source():
    turns = Trajectory((prompt(1), sampled([2], [-1.0], 1), prompt(11, source="calculator")), "stop")
    with pytest.raises(EngineError, match=r"token id 11 in segment 2 \(calculator\); it"):
        assemble(TrajectoryBatch.from_trajectories([turns]), group_ids=torch.tensor([0]), uids=["a"], vocab_size=10)


def test_row_counts_that_differ_are_refused():
    rows = TrajectoryBatch.single_turn(Ragged.from_rows([[1]], torch.int64), generations([[1]], [[-1.0]]))
    with pytest.raises(EngineError, match=r"\(1, 2, 1\) rows"):
        assemble(rows, group_ids=torch.tensor([0, 1]), uids=["a"])


def test_tokens_need_a_logprob_and_a_version_each():
    with pytest.raises(EngineError, match="2 tokens and 1 log-probs"):
        generations([[1, 2]], [[-1.0]])
    with pytest.raises(EngineError, match="2 tokens and 1 policy versions"):
        generations([[1, 2]], [[-1.0, -1.0]], [[3]])
    empty = Ragged.from_rows([], torch.int64)
    with pytest.raises(EngineError, match="1 finish reasons for 0 rows"):
        Generations(empty, empty, empty, ["stop"])
    with pytest.raises(EngineError, match=r"2 policy tokens has \[1, 2\]"):
        Segment(torch.tensor([1, 2]), "policy", torch.zeros(1), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(EngineError, match=r"2 policy tokens has \[2\]"):
        Segment(torch.tensor([1, 2]), "policy", torch.zeros(2))

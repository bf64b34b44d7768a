"""Forecasts of running ahead, against schedules computed by hand."""

import numpy as np
import pytest

from rlpack.packing.analysis.running_ahead import Rates, Setup, forecast_run, setups, with_mean
from rlpack.packing.errors import PackingError

# Ten responses of 100 tokens on ten slots: 10 s of generation; 2,000 tokens to train on: 10 s on one rank.
EVEN = np.array([100])
RATES = Rates(token_s=0.1, slots=10, train_tokens_per_s=200.0, publish_s=0.0, prompt_tokens=100.0, rows_per_step=10)


def test_in_turns_a_step_takes_generation_training_and_publication():
    rates = Rates(**(vars(RATES) | {"publish_s": 1.0}))
    found = forecast_run(EVEN, rates, Setup(0, "drain", 1, 1))
    assert found.step_s == pytest.approx(21.0)
    assert found.training_idle == pytest.approx(10 / 21)
    assert found.engines_idle == pytest.approx(11 / 21)
    assert found.staleness_max == 0


@pytest.mark.parametrize("publish", ["drain", "in_flight"])
def test_one_step_ahead_generation_and_training_of_equal_time_overlap_whole(publish):
    found = forecast_run(EVEN, RATES, Setup(1, publish, 1, 1))
    assert found.step_s == pytest.approx(10.0, rel=0.05)
    assert found.training_idle < 0.05
    assert (found.staleness_mean, found.staleness_max) == (1.0, 1)  # the first step's age of 0 doesn't count


def test_with_drain_a_publication_delays_both_sides_and_in_flight_what_is_in_flight():
    rates = Rates(**(vars(RATES) | {"publish_s": 2.0}))
    drain, in_flight = (forecast_run(EVEN, rates, Setup(1, publish, 1, 1)) for publish in ("drain", "in_flight"))
    assert drain.step_s == pytest.approx(12.0, rel=0.05)
    assert in_flight.step_s == pytest.approx(12.0, rel=0.05)


@pytest.mark.parametrize(
    ("setup", "step_s"),
    [(Setup(0, "drain", 1, 1), 25.0), (Setup(1, "drain", 1, 1), 15.0), (Setup(2, "in_flight", 1, 1), 10.0)],
)
def test_scoring_delays_a_batch_and_leaves_the_engines_to_later_ones(setup: Setup, step_s: float):
    rates = Rates(**(vars(RATES) | {"score_s": 5.0}))
    assert forecast_run(EVEN, rates, setup).step_s == pytest.approx(step_s, rel=0.05)


@pytest.mark.parametrize(
    ("lead", "score_s", "step_s"),
    # In turns, 4 of the 10 s of training overlap scoring; with a lead, a batch is scored before it is taken.
    [(0, 3.0, 20.0), (0, 4.0, 20.0), (0, 9.0, 25.0), (1, 3.0, 13.0), (1, 9.0, 19.0)],
)
def test_scoring_overlaps_the_training_that_needs_no_rewards_in_turns_only(lead: int, score_s: float, step_s: float):
    rates = Rates(**(vars(RATES) | {"score_s": score_s, "share_before_rewards": 0.4}))
    assert forecast_run(EVEN, rates, Setup(lead, "drain", 1, 1)).step_s == pytest.approx(step_s, rel=0.05)


@pytest.mark.parametrize(("score_s", "train_tokens_per_s", "step_s"), [(5.0, 200.0, 12.5), (4.0, 100.0, 20.0)])
def test_with_drain_scoring_in_pools_of_its_own_overlaps_both_sides(
    score_s: float, train_tokens_per_s: float, step_s: float
):
    # With g, s and t seconds of generation, scoring and training, a step waits w for scores, and the next batch is
    # generated from its start on. It publishes after w + t, which is w + t - g after that generation. So
    # w = s - (w + t - g), and a step takes w + t = (g + s + t) / 2, or t if that is more.
    given = {"score_s": score_s, "train_tokens_per_s": train_tokens_per_s, "scores_apart": True}
    rates = Rates(**(vars(RATES) | given))
    assert forecast_run(EVEN, rates, Setup(1, "drain", 1, 1)).step_s == pytest.approx(step_s, rel=0.05)


def test_scoring_in_pools_of_its_own_overlaps_no_greedy_responses_of_the_engines():
    given = {"score_s": 5.0, "greedy_s": 5.0, "train_tokens_per_s": 200.0, "scores_apart": True}
    rates = Rates(**(vars(RATES) | given))
    # 10 s for the sampled responses and 5 s for the greedy ones, while 5 s of training are hidden.
    assert forecast_run(EVEN, rates, Setup(1, "drain", 1, 1)).step_s == pytest.approx(15.0, rel=0.05)


@pytest.mark.parametrize("added_s", [0.0, 0.01, 0.05])
def test_responses_of_an_engine_slow_each_other_down(added_s: float):
    rates = Rates(**(vars(RATES) | {"token_s_per_response": added_s, "slots": 400, "train_tokens_per_s": 1e9}))
    for engines, others in ((1, 9), (2, 4), (10, 0), (20, 0)):
        found = forecast_run(EVEN, rates, Setup(1, "drain", engines, 1))
        assert found.step_s == pytest.approx(100 * (0.1 + others * added_s))


@pytest.mark.parametrize("lead", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("steps", [15, 60])
def test_batches_in_flight_come_in_rounds_of_which_whole_ones_count(lead: int, steps: int):
    rates = Rates(**(vars(RATES) | {"token_s_per_response": 0.01, "slots": 4000, "train_tokens_per_s": 1e9}))
    # All batches in flight end together and are trained on at once, and as many begin.
    found = forecast_run(EVEN, rates, Setup(lead, "in_flight", 1, 1), steps=steps)
    together = 10 * (lead + 1)
    assert found.step_s == pytest.approx(100 * (0.1 + (together - 1) * 0.01) / (lead + 1), rel=0.01)
    assert found.engines_idle == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("slots", [40, 400])
def test_batches_in_flight_share_the_slots_of_an_engine(slots: int):
    rates = Rates(**(vars(RATES) | {"slots": slots, "train_tokens_per_s": 800.0}))
    found = forecast_run(EVEN, rates, Setup(3, "in_flight", 1, 1))
    # Each of four batches takes 10 s in the engine, at the same time as the others, and is trained on for 2.5 s.
    assert found.step_s == pytest.approx(12.5 / 4, rel=0.05)
    assert found.engines_idle == pytest.approx(2.5 / 12.5, abs=0.05)  # the last batches run alone
    for ranks in (1, 2):  # slots that the only batch in the engines doesn't need are not idle
        found = forecast_run(EVEN, rates, Setup(1, "drain", ranks, 1))
        assert found.step_s == pytest.approx(10.0, rel=0.05)
        assert found.engines_idle < 0.05


def test_a_longer_lead_hides_the_tail_of_long_responses():
    # Nine of ten responses take 1 s, one takes 20 s, on two slots: the tail leaves a slot free.
    lengths = np.array([10] * 9 + [200])
    rates = Rates(token_s=0.1, slots=2, train_tokens_per_s=1e9, publish_s=0.0, prompt_tokens=0.0, rows_per_step=10)
    one = forecast_run(lengths, rates, Setup(1, "drain", 1, 1), steps=400)
    four = forecast_run(lengths, rates, Setup(4, "in_flight", 1, 1), steps=400)
    work_s = lengths.mean() * 10 * 0.1 / 2  # of both slots, none of which ever waits
    assert four.step_s == pytest.approx(work_s, rel=0.1)
    assert one.step_s > 1.15 * work_s
    assert four.engines_idle < 0.05 < one.engines_idle


def test_lengths_get_the_mean_of_a_run_and_keep_their_range():
    lengths = np.array([450, 10, 20, 30, 450])
    found = with_mean(lengths, 110.0)
    assert found.mean() == pytest.approx(110.0, rel=0.01)
    assert set(found) == {10, 20, 30, 450}
    assert (with_mean(np.array([7, 7]), 7.0) == 7).all()


@pytest.mark.parametrize(("lengths", "mean"), [([450, 10, 20, 30, 450], 600.0), ([8, 8], 6.5), ([90, 100], 1.25)])
def test_lengths_whose_range_excludes_the_mean_are_scaled(lengths, mean):
    found = with_mean(np.array(lengths), mean)
    assert found.dtype == np.int64
    assert found.mean() == pytest.approx(mean, rel=0.01)
    assert found.min() >= 1
    assert found.max() == pytest.approx(max(lengths) * mean / np.mean(lengths), abs=1)


@pytest.mark.parametrize("lead", [1, 2, 5])
def test_no_response_is_staler_than_the_lead(lead):
    lengths = np.random.default_rng(0).lognormal(4, 1, 1000).astype(np.int64) + 1
    found = forecast_run(lengths, RATES, Setup(lead, "in_flight", 1, 1))
    assert 0 < found.staleness_mean <= found.staleness_max <= lead


def test_all_splits_of_few_ranks_and_some_of_many():
    few = list(setups(4, (0, 1, 2)))
    assert few[0] == Setup(0, "drain", 4, 4)
    assert {(one.lead, one.publish) for one in few} == {(0, "drain"), (1, "drain"), (1, "in_flight"), (2, "in_flight")}
    assert [one.engine_ranks for one in few if one.lead == 2] == [1, 2, 3]
    many = list(setups(512, (2,)))
    assert len(many) == 15
    assert all(one.engine_ranks + one.train_ranks == 512 for one in many)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rates(token_s=0.0), "token_s is 0; it has to be finite and above 0"),
        (lambda: Rates(publish_s=-1.0), "publish_s is -1; it has to be finite and at least 0"),
        (lambda: forecast_run(EVEN, RATES, Setup(2, "drain", 1, 1)), "the lead is 2; it has to be 0 or 1 with drain"),
        (lambda: forecast_run(EVEN, RATES, Setup(0, "in_flight", 1, 1)), "with which nothing is in flight"),
        (lambda: forecast_run(EVEN, RATES, Setup(1, "drain", 0, 2)), "0 ranks generate and 2 train"),
    ],
)
def test_what_can_not_run_is_refused(make, said):
    with pytest.raises(PackingError, match=said):
        make()

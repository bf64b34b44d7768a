from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlpack.observe.report.packing_picture import MOST_SEQUENCES, Boxes, draw, layout_boxes, packing_picture
from rlpack.observe.report.plan_record import PlanRecord, read_plan
from rlpack.observe.report.plot_style import sequence_color
from rlpack.packing.analysis.cost import Cost
from rlpack.packing.batching import Batching, Mode
from rlpack.packing.make_plan import make_plan
from rlpack.packing.plan import MicrobatchPlan

MODES = st.sampled_from(["packed", "dynamic", "fixed"])


def plan(lengths: list[int], mode: Mode = "packed", ranks: int = 2, mini: int | None = None) -> MicrobatchPlan:
    batching = Batching(mode=mode, max_tokens=64, micro_batch_size=3, pad_to_multiple=4 if mode == "packed" else 1)
    return make_plan(np.asarray(lengths, dtype=np.int64), batching, dp_size=ranks, mini_batch_size=mini)


def area(places: list[tuple[float, ...]], height: float) -> float:
    return sum(place[-2] * place[-1] for place in places) / height


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=30), mode=MODES, ranks=st.integers(1, 5))
def test_areas_are_true_and_every_sequence_is_drawn_once(lengths: list[int], mode: Mode, ranks: int) -> None:
    boxes = layout_boxes(plan(lengths, mode, ranks), 0)
    band = boxes.outlines[0][3]
    assert sorted(row for row, *_ in boxes.sequences) == list(range(len(lengths)))
    assert area(boxes.sequences, band) == pytest.approx(sum(lengths))
    assert area(boxes.outlines, band) == pytest.approx(boxes.slots)
    # Slots and waiting together fill every rank up to the end of the slowest.
    assert area(boxes.outlines, band) + area(boxes.waiting, band) == pytest.approx(ranks * boxes.end)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), mode=MODES)
def test_no_two_sequences_overlap_and_each_lies_in_a_microbatch(lengths: list[int], mode: Mode) -> None:
    boxes = layout_boxes(plan(lengths, mode), 0)
    for _, x, y, width, height in boxes.sequences:
        inside = [
            True for left, top, wide, high in boxes.outlines
            if left <= x and x + width <= left + wide + 1e-6 and top - 1e-6 <= y and y + height <= top + high + 1e-6
        ]  # fmt: skip
        assert len(inside) == 1
    places = [tuple(place) for _, *place in boxes.sequences]
    for number, (x, y, width, height) in enumerate(places):
        for other_x, other_y, other_width, other_height in places[number + 1 :]:
            apart = x + width <= other_x + 1e-6 or other_x + other_width <= x + 1e-6
            assert apart or y + height <= other_y + 1e-6 or other_y + other_height <= y + 1e-6


@pytest.mark.parametrize("mode", ["packed", "dynamic", "fixed"])
def test_the_waste_in_the_picture_is_that_of_the_plan(mode: Mode) -> None:
    made = plan([60, 3, 17, 44, 9, 31, 5], mode)
    assert layout_boxes(made, 0).waste == pytest.approx(made.metrics.waste_ratio)


def test_padded_rows_worked_out_by_hand() -> None:
    # Two rows of 4 and 2 tokens in one microbatch: 8 slots, 6 of them used.
    boxes = layout_boxes(plan([4, 2], "fixed", ranks=1), 0)
    assert (boxes.slots, boxes.tokens, boxes.waste) == (8, 6, 0.25)
    half = boxes.outlines[0][3] / 2
    assert boxes.sequences == [(0, 0.0, 0.0, 8.0, half), (1, 0.0, half, 4.0, half)]


def test_only_the_asked_optimizer_step_is_drawn() -> None:
    made = plan([10] * 8, mini=4)
    rows = {row for row, *_ in layout_boxes(made, 1).sequences}
    assert rows == set(np.flatnonzero(made.step_of_row == 1).tolist())
    assert layout_boxes(made, 2) == Boxes()


def test_a_png_is_written_wide_enough_for_a_readme(tmp_path: Path) -> None:
    plans = {"padded": plan([5, 60, 7, 8], "fixed"), "packed": plan([5, 60, 7, 8])}
    path = packing_picture(plans, tmp_path / "p.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width == 1800


@pytest.mark.parametrize("lengths", [[], [0, 0], [1]])
def test_degenerate_steps_are_drawn(tmp_path: Path, lengths: list[int]) -> None:
    plans = {"fixed": plan(lengths, "fixed", 3), "packed": plan(lengths, "packed", 3)}
    assert packing_picture(plans, tmp_path / "p.png").stat().st_size > 1000


def test_a_picture_with_too_many_sequences_is_cut_and_says_so() -> None:
    made = {"fixed": plan([8] * 600, "fixed", ranks=2), "packed": plan([8] * 600, ranks=2)}
    figure = draw(made)
    packed = layout_boxes(made["packed"], 0)
    _, right = figure.axes[1].get_xlim()
    drawn = [box for box in packed.sequences if box[2] == 0 and box[1] < right]
    assert len(drawn) <= MOST_SEQUENCES + 1
    assert "the first 800 of 2,400 are shown" in figure.axes[1].get_xlabel()
    assert "4,800 slots, 4,800 tokens" in figure.axes[1].get_title(loc="right")
    assert "are shown" not in draw({"packed": plan([8] * 100)}).axes[0].get_xlabel()


def test_a_sequence_has_one_color_and_its_neighbors_another() -> None:
    colors = [sequence_color(row) for row in range(300)]
    assert colors == [sequence_color(row) for row in range(300)]
    assert len(set(colors)) == 300
    # Never near the gray of waste.
    assert min(max(color) - min(color) for color in colors) > 0.2


@pytest.mark.parametrize("cost", [None, Cost(0.0, 1.0)])
def test_a_plan_record_survives_the_file_and_makes_the_same_plan(tmp_path: Path, cost: Cost | None) -> None:
    made = make_plan([10, 20, 30, 40, 50], Batching(max_tokens=128), dp_size=2, mini_batch_size=3, cost=cost)
    record = PlanRecord.of(made, step=7, responses=[5, 6, 7, 8, 9])
    record.write(tmp_path / "packing.json")
    assert PlanRecord.read(tmp_path / "packing.json") == record
    assert (record.step, record.responses) == (7, (5, 6, 7, 8, 9))
    assert np.array_equal(record.plan().order, made.order)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"lengths": ["x"]}', '{"step": 1, "lengths": [1], "batching": {"mode": 3}}'),
        *(
            '{"step": 1, "lengths": [3], "batching": {}, "num_ranks": 1, "mini_batch_size": null, ' + each + "}"
            for each in ('"responses": [1, 2]', '"responses": [4]', '"responses": [-1]', '"groups": [0, 0]')
        ),
    ],
)
def test_a_broken_plan_record_is_skipped_with_a_warning(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "packing.json").write_text(content)
    assert read_plan(tmp_path / "packing.json") is None
    assert "the packing picture is skipped" in caplog.text


def test_the_comparison_never_fails_on_a_row_over_the_budget() -> None:
    record = PlanRecord(1, (10, 500, 20), Batching(max_tokens=64, micro_batch_size=3), 2)
    plans = record.comparison()
    assert list(plans) == ["fixed (padded, in arrival order)", "packed"]
    assert {layout_boxes(made, 0).tokens for made in plans.values()} == {530}


def test_a_plan_with_shared_prompts_is_recorded_and_compared_with_rows_that_share_none(tmp_path: Path):
    prompts = [0, 0, 0, 1, 1, 1]
    batching = Batching(max_tokens=64, share_prompts=True)
    plan = make_plan(
        [12, 14, 11, 9, 8, 10], batching, dp_size=1, groups=prompts, split_groups=True, prefixes=[8] * 3 + [6] * 3
    )
    PlanRecord.of(plan).write(tmp_path / "plan.json")
    plans = PlanRecord.read(tmp_path / "plan.json").comparison()
    assert plans["packed"].metrics == plan.metrics
    assert plan.metrics.shared_tokens == 28
    assert [each.metrics.shared_tokens for each in plans.values()] == [0, 28]
    boxes = layout_boxes(plans["packed"], 0)
    assert (boxes.tokens, boxes.slots, boxes.waste) == (36, 36, 0.0)


@pytest.mark.parametrize("share", [False, True])
def test_groups_that_stay_whole_are_recorded_and_stay_whole_in_the_comparison(tmp_path: Path, share: bool):
    groups = [0, 0, 0, 1, 1, 2, 2, 2]
    plan = make_plan(
        [9, 30, 8, 20, 20, 5, 40, 6],
        Batching(max_tokens=64, share_prompts=share),
        dp_size=2,
        groups=groups,
        prefixes=[4] * 8 if share else None,
    )
    PlanRecord.of(plan).write(tmp_path / "plan.json")
    again = PlanRecord.read(tmp_path / "plan.json").comparison()["packed"]
    assert (again.order.tolist(), again.metrics) == (plan.order.tolist(), plan.metrics)
    microbatch = np.repeat(np.arange(again.counts.size), again.counts.ravel())[np.argsort(again.order)]
    assert [len(set(microbatch[np.array(groups) == group])) for group in range(3)] == [1, 1, 1]

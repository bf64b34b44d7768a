"""The packing picture: how the token slots of a step are used, for several plans of the same lengths.

A row of the picture is a rank, and time runs to the right in token slots. A microbatch is a box whose area is its
number of slots: in the padded modes a matrix with one line per sequence, in packed mode one line of concatenated
sequences. Each sequence has one color in all plans, padding is gray, and hatching marks a rank that waits for a
slower one, since all ranks synchronize at every microbatch. All plans share one scale, so a shorter bar is a shorter
step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from rlpack.observe.report.plot_style import INK, SETTINGS, TEXT_SIZE, WAITING, WASTE, sequence_color
from rlpack.packing.plan import Microbatch, MicrobatchPlan

MOST_RANKS = 8
# More sequences on a rank would be too narrow to tell apart; the rest is counted but not drawn.
MOST_SEQUENCES = 100
WIDTH, BAND, RANK_HEIGHT, PANEL_TEXT, MARGINS = 10.0, 0.84, 0.62, 0.66, 1.34  # inches; BAND: fraction of a row
DPI = 180


@dataclass
class Boxes:
    """Rectangles to draw, as (x, y, width, height) in slots and ranks.

    Attributes:
        sequences: (row, x, y, width, height) of each sequence.
        padding: slots without a token.
        waiting: times in which a rank waits for another.
        outlines: the microbatches.
        end: slots until the slowest rank is done.
        slots: slots of all ranks.
        tokens: real tokens of all ranks.
        microbatches: microbatches with rows, over all ranks.
    """

    sequences: list[tuple[int, float, float, float, float]] = field(default_factory=list)
    padding: list[tuple[float, float, float, float]] = field(default_factory=list)
    waiting: list[tuple[float, float, float, float]] = field(default_factory=list)
    outlines: list[tuple[float, float, float, float]] = field(default_factory=list)
    end: float = 0.0
    slots: int = 0
    tokens: int = 0
    microbatches: int = 0

    @property
    def waste(self) -> float:
        """Return the fraction of slots without a token."""
        return 1.0 - self.tokens / self.slots if self.slots else 0.0


def packing_picture(plans: Mapping[str, MicrobatchPlan], path: Path, step: int = 0) -> Path:
    """Draw one optimizer step of several plans of the same lengths; return the picture's path.

    The path's suffix selects the file format, any that matplotlib writes.

    Args:
        plans: plans by title, drawn from top to bottom.
        path: the output file.
        step: the optimizer step to draw; a plan without it is drawn empty.

    Raises:
        OSError: the file can't be written.
    """
    with matplotlib.rc_context(SETTINGS):
        draw(plans, step).savefig(path, dpi=DPI)
    return path


def draw(plans: Mapping[str, MicrobatchPlan], step: int = 0) -> Figure:
    """Return the figure of `packing_picture`; call it with `plot_style.SETTINGS` active."""
    boxes = {title: layout_boxes(plan, step) for title, plan in plans.items()}
    ranks = min(MOST_RANKS, max((plan.num_ranks for plan in plans.values()), default=1))
    panel = ranks * RANK_HEIGHT + PANEL_TEXT
    height = MARGINS + panel * max(1, len(plans))
    figure = Figure(figsize=(WIDTH, height))
    whole = max((layout.end for layout in boxes.values()), default=1.0) or 1.0
    end = min(whole, *(_legible_end(layout) for layout in boxes.values())) if boxes else whole
    for number, (title, plan) in enumerate(plans.items()):
        bottom = height - 0.42 - panel * number - PANEL_TEXT + 0.3 - ranks * RANK_HEIGHT
        axes = figure.add_axes((0.085, bottom / height, 0.9, ranks * RANK_HEIGHT / height))
        _draw_panel(axes, _cut(boxes[title], end), min(plan.num_ranks, MOST_RANKS), end)
        _title_panel(axes, title, boxes[title])
        if number == len(plans) - 1:
            part = "" if end == whole else f"; the first {end:,.0f} of {whole:,.0f} are shown"
            axes.set_xlabel(f"token slots computed by each rank, in order (same scale for all plans){part}")
        else:
            axes.tick_params(labelbottom=False)
    _title_figure(figure, plans, step, height)
    _legend(figure)
    return figure


def layout_boxes(plan: MicrobatchPlan, step: int) -> Boxes:
    """Return the rectangles of one optimizer step.

    Ranks after the eighth are counted but not drawn.
    """
    boxes = Boxes()
    if step >= plan.num_steps:
        return boxes
    ranks = [plan.microbatches(rank, step) for rank in range(plan.num_ranks)]
    for together in zip(*ranks, strict=True):
        widths = [slots_of(microbatch, plan) for microbatch in together]
        longest = max(widths)
        for rank, (microbatch, width) in enumerate(zip(together, widths, strict=True)):
            boxes.slots += width
            boxes.tokens += int((plan.lengths - plan.shared)[microbatch.rows].sum())
            boxes.microbatches += not microbatch.is_dummy
            if rank >= MOST_RANKS:
                continue
            _add_microbatch(boxes, microbatch, plan, boxes.end, rank)
            if width < longest:
                boxes.waiting.append((boxes.end + width, rank, longest - width, BAND))
        boxes.end += longest
    return boxes


def _legible_end(boxes: Boxes) -> float:
    """Return the slot at which a rank exceeds `MOST_SEQUENCES`, or infinity."""
    starts: dict[int, list[float]] = {}
    for _, x, y, *_ in boxes.sequences:
        # Count one line of each padded microbatch, whose lines are stacked vertically.
        if y == int(y):
            starts.setdefault(int(y), []).append(x)
    ends = [sorted(lefts)[MOST_SEQUENCES] for lefts in starts.values() if len(lefts) > MOST_SEQUENCES]
    return min(ends, default=float("inf"))


def _cut(boxes: Boxes, end: float) -> Boxes:
    """Return the boxes that start before slot `end`; the totals stay unchanged."""
    return replace(
        boxes,
        sequences=[box for box in boxes.sequences if box[1] < end],
        **{name: [box for box in vars(boxes)[name] if box[0] < end] for name in ("padding", "waiting", "outlines")},
    )


def slots_of(microbatch: Microbatch, plan: MicrobatchPlan) -> int:
    """Return the number of token slots that a microbatch computes."""
    return microbatch.length if plan.batching.mode == "packed" else microbatch.length * max(1, microbatch.rows.size)


def _add_microbatch(boxes: Boxes, microbatch: Microbatch, plan: MicrobatchPlan, left: float, rank: int) -> None:
    """Add one microbatch: a gray box for padding, and its sequences on top."""
    outline = (left, float(rank), float(slots_of(microbatch, plan)), BAND)
    boxes.outlines.append(outline)
    boxes.padding.append(outline)
    lengths = (plan.lengths - plan.shared)[microbatch.rows]
    if plan.batching.mode == "packed":
        multiple = plan.batching.pad_to_multiple
        starts = left + np.concatenate(([0], np.cumsum(-(-lengths // multiple) * multiple)))
        for row, start, length in zip(microbatch.rows, starts, lengths, strict=False):
            boxes.sequences.append((int(row), float(start), float(rank), float(length), BAND))
        return
    # n lines of 1/n of the height: a slot is n times as wide and 1/n as high, so areas stay proportional.
    lines = max(1, microbatch.rows.size)
    for line, (row, length) in enumerate(zip(microbatch.rows, lengths, strict=True)):
        boxes.sequences.append((int(row), left, rank + BAND * line / lines, float(length * lines), BAND / lines))


def _draw_panel(axes: Axes, boxes: Boxes, ranks: int, end: float) -> None:
    """Draw the boxes of one plan."""
    axes.add_collection(PolyCollection(list(_corners(boxes.padding)), facecolors=WASTE, edgecolors="none"))
    waiting = PolyCollection(list(_corners(boxes.waiting)), facecolors=WAITING, edgecolors="#d5d9de", linewidths=0.5)
    waiting.set_hatch("////")
    axes.add_collection(waiting)
    colors = [sequence_color(row) for row, *_ in boxes.sequences]
    sequences = list(_corners([tuple(place) for _, *place in boxes.sequences]))
    # White borders separate neighbors; with very many sequences they would hide the colors.
    border = 0.5 if len(sequences) <= 150 else 0.15
    axes.add_collection(PolyCollection(sequences, facecolors=colors, edgecolors="white", linewidths=border))
    axes.add_collection(PolyCollection(list(_corners(boxes.outlines)), facecolors="none", edgecolors=INK, linewidths=1))
    axes.set_xlim(0, end * 1.004)
    axes.set_ylim(ranks - 1 + BAND + 0.03, -0.03)
    axes.set_yticks([rank + BAND / 2 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.spines[["top", "right", "left"]].set_visible(False)


def _title_panel(axes: Axes, title: str, boxes: Boxes) -> None:
    """Write the plan's name and totals above its panel."""
    axes.set_title(f"{title}: {boxes.waste:.1%} waste" if boxes.slots else f"{title}: empty", pad=5)
    text = f"{boxes.slots:,} slots, {boxes.tokens:,} tokens, {boxes.microbatches:,} microbatches"
    axes.set_title(text, loc="right", pad=5, fontweight="normal", fontsize=TEXT_SIZE)


def _title_figure(figure: Figure, plans: Mapping[str, MicrobatchPlan], step: int, height: float) -> None:
    """Write the title of the whole picture."""
    plan = next(iter(plans.values()), None)
    rows = 0 if plan is None else int((plan.step_of_row == step).sum())
    ranks = 0 if plan is None else plan.num_ranks
    text = f"The same {rows:,} sequences on {ranks} rank{'s' if ranks != 1 else ''}, one optimizer step"
    if ranks > MOST_RANKS:
        text += f" (ranks 0 to {MOST_RANKS - 1} are shown)"
    figure.text(0.015, 1 - 0.16 / height, text, fontsize=TEXT_SIZE + 3, fontweight="bold", va="top")


def _legend(figure: Figure) -> None:
    """Add the legend."""
    handles = [
        Patch(facecolor=sequence_color(1), edgecolor="white", label="a sequence (one color each)"),
        Patch(facecolor=WASTE, label="padding (waste)"),
        Patch(facecolor=WAITING, edgecolor="#9aa1a9", hatch="////", label="waiting for another rank"),
        Line2D([], [], marker="s", markersize=9, color="none", markeredgecolor=INK, label="a microbatch"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=4, fontsize=TEXT_SIZE, handlelength=1.4, labelcolor=INK)


def _corners(places: list[tuple[float, ...]]) -> Iterator[list[tuple[float, float]]]:
    """Yield the four corners of each rectangle."""
    for x, y, width, height in places:
        yield [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]

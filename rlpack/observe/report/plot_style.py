"""The style of every plot: one text size, and one meaning per color."""

import colorsys
from io import BytesIO
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# A palette for color-blind readers (Okabe and Ito, 2008), dark enough on white.
REWARD, SAMPLED, BEST, GREEDY, LOSS = "#0072B2", "#D55E00", "#E69F00", "#009E73", "#8C4A86"
INK, FAINT, WASTE, WAITING = "#1f2328", "#6e7781", "#c8ccd1", "#ffffff"
TEXT_SIZE = 11
SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT_SIZE,
    "axes.titlesize": TEXT_SIZE + 1,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "hatch.color": "#9aa1a9",
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "svg.hashsalt": "rlpack",
}


def sequence_color(row: int) -> tuple[float, float, float]:
    """Return the color of a row, the same in every picture.

    Hues advance by the golden angle, in three lightnesses.

    >>> sequence_color(3) == sequence_color(3), sequence_color(3) == sequence_color(4)
    (True, False)
    """
    hue = (row * 0.61803398875) % 1.0
    return colorsys.hls_to_rgb(hue, (0.42, 0.55, 0.68)[row % 3], (0.50, 0.48, 0.58)[row % 3])


def despine(axes: Axes, *, grid: Literal["x", "y", "both"] = "y") -> None:
    """Remove the top and right spines, and add a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#e4e7eb", linewidth=0.8)


def from_zero(axes: Axes) -> None:
    """Begin the y axis at zero, and end it above the highest value."""
    axes.set_ylim(0, max(axes.dataLim.y1, 0) * 1.08 or 1)


def svg(figure: Figure) -> str:
    """Return a figure as SVG text; deterministic, without a date."""
    stream = BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.08)
    return stream.getvalue().decode("utf-8")

"""Pictures of matplotlib: one look for all, safe for the colour-blind, on white."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from lampq.errors import MissingDependencyError

FORMS = ("png", "svg", "pdf")
# Okabe and Ito (2008), apart in hue and in brightness
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY, BLACK = "#CC79A7", "#56B4E9", "#8A8F98", "#2B2F36"
ROLE_STYLE = {
    "qkv": (BLUE, "o"),
    "proj": (SKY, "s"),
    "fc1": (RED, "^"),
    "fc2": (ORANGE, "D"),
}
MODULE_STYLE = {"MSA": (BLUE, "o"), "MLP": (RED, "^"), "block": (BLACK, "s")}
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E6EA",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "svg.hashsalt": "lampq",
    "pdf.fonttype": 42,
}


def require_matplotlib() -> None:
    """One sentence that says how to get it, where it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "pictures need matplotlib: pip install 'lampq[reproduce]', or leave them out with "
            "--no-pictures"
        ) from None


def render(draw: Any, found: Sequence[Any], size: tuple[float, float]) -> dict[str, bytes]:
    """The picture that ``draw`` makes of what was found, in every form."""
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    pictures = {}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, found)
        for form in FORMS:
            stream = io.BytesIO()
            # no date: the same numbers give the same file
            about = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
            figure.savefig(stream, format=form, dpi=110, metadata=about)
            pictures[form] = _small(stream) if form == "png" else stream.getvalue()
    return pictures


def _small(picture: io.BytesIO) -> bytes:
    """A PNG file of few colours, which is all that a chart has."""
    from PIL import Image

    stream = io.BytesIO()
    with Image.open(picture) as opened:
        opened.convert("RGB").quantize(64).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def lines(
    panel: Any,
    places: Sequence[int],
    series: Mapping[str, Sequence[float | None]],
    styles: Mapping[str, tuple[str, str]],
) -> None:
    """One line with markers for each series; places without a value are left out."""
    for name, values in series.items():
        points = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
        if points:
            colour, marker = styles[name]
            panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=name)


def whole_ticks(axis: Any) -> None:
    """Marks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def legend_above(panel: Any, columns: int) -> None:
    """The names of the lines above the panel, where they hide nothing."""
    panel.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        columnspacing=0.9,
        handlelength=1.6,
        handletextpad=0.4,
    )

"""The numbers of a benchmark as a bar chart."""

from __future__ import annotations

import io
from typing import Any

from lampq.errors import MissingDependencyError

COLOURS = {"fp32": "#9aa5b1", "bf16": "#7b8794", "int8": "#c99a2e", "lampq": "#2f6f4f"}


def require_matplotlib() -> Any:
    """Figures of matplotlib, or one sentence that says how to get them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "the chart needs matplotlib: pip install 'lampq[bench]'"
        ) from None
    return Figure


def chart(found: dict[str, Any], form: str) -> bytes:
    """A picture of size and speed, "png" or "svg"."""
    settings = sorted({(row["threads"], row["batch"]) for row in found["rows"]})
    names = list(dict.fromkeys((row["runtime"], row["kind"]) for row in found["rows"]))
    figure = require_matplotlib()(
        figsize=(3.2 * (1 + len(settings)), 1.6 + 0.3 * len(names)), layout="constrained"
    )
    panels = figure.subplots(1, 1 + len(settings))
    _sizes(panels[0], found["size"])
    for panel, (threads, batch) in zip(panels[1:], settings, strict=True):
        rows = {
            (row["runtime"], row["kind"]): row["against_torch"]
            for row in found["rows"]
            if (row["threads"], row["batch"]) == (threads, batch)
        }
        _speeds(panel, names, rows, first=panel is panels[1])
        images = "1 image" if batch == 1 else f"{batch} images"
        panel.set_title(f"{images}, {threads} thread{'s' if threads > 1 else ''}", fontsize=9)
    figure.suptitle(
        f"{found['model']}: size, and speed in multiples of torch fp32 "
        f"(median and range of {found['rounds']} rounds)",
        fontsize=10,
    )
    stream = io.BytesIO()
    figure.savefig(stream, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return stream.getvalue()


def _sizes(panel: Any, size: dict[str, Any]) -> None:
    bars = {
        "fp32": size["float_bytes"] / 1e6,
        "int8": size["bytes_at_8_bits"] / 1e6,
        "lampq": size["bytes"] / 1e6,
    }
    panel.barh(list(bars), list(bars.values()), color=[COLOURS[name] for name in bars])
    panel.invert_yaxis()
    for place, value in enumerate(bars.values()):
        panel.text(value, place, f" {value:.3g}", va="center", fontsize=8)
    panel.set_xlim(0, 1.25 * max(bars.values()))
    panel.set_title("file size [MB]", fontsize=9)
    _tidy(panel)


def _speeds(
    panel: Any, names: list[tuple[str, str]], rows: dict[tuple[str, str], Any], *, first: bool
) -> None:
    values = [rows[name]["median"] for name in names]
    spread = [
        [rows[name]["median"] - rows[name]["low"] for name in names],
        [rows[name]["high"] - rows[name]["median"] for name in names],
    ]
    panel.barh(
        range(len(names)),
        values,
        xerr=spread,
        color=[COLOURS[kind] for _, kind in names],
        error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
    )
    panel.set_yticks(range(len(names)), [" ".join(name) if first else "" for name in names])
    panel.invert_yaxis()
    panel.axvline(1, color="#333333", linewidth=0.6, linestyle=":")
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        panel.text(rows[name]["high"], place, f" {value:.2f}", va="center", fontsize=8)
    panel.set_xlim(0, 1.25 * max(rows[name]["high"] for name in names))
    _tidy(panel)


def _tidy(panel: Any) -> None:
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)

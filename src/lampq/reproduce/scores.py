"""Methods against models: the layout that the tables of accuracy and precision share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lampq.reproduce.lab import Lab, Row
from lampq.reproduce.part import Found, told_once
from lampq.reproduce.pictures import BLACK, BLUE, GREY, ORANGE
from lampq.reproduce.published import Scores
from lampq.reproduce.table import Cell, Column, Table

PAPER = "published"
# what rows of trials have for other parts
OF_OTHERS = ("plan", "details")


@dataclass(frozen=True, slots=True)
class Method:
    """A row: its name, what the paper calls it, and the options that give it."""

    key: str
    label: str
    plan: str
    options: Mapping[str, Any]
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """What is measured: its key in a row, its title, and the key of its 95 % interval."""

    key: str
    title: str
    interval: str | None = None
    form: str = ".2f"


TOP1 = Measure("top1", "top-1 [%]", "interval95")


def wanted(methods: Sequence[Method], rows: Sequence[str]) -> list[Method]:
    """The methods that were asked for, all if none was named."""
    return [method for method in methods if not rows or method.key in rows]


def measured(
    lab: Lab, cases: Sequence[tuple[Method, float, str]], changes: Mapping[str, Any] | None = None
) -> list[Row]:
    """The rows of these methods at these widths; ``changes`` are options of all."""
    trials = {
        f"{method.label} {widths}": lab.trial(
            method.plan, bits, {**(changes or {}), **method.options}
        )
        for method, bits, widths in cases
    }
    found = lab.run(trials)
    return [
        {
            **{"key": method.key, "method": method.label, "at": widths, "mixed": method.mixed},
            **{name: value for name, value in row.items() if name not in OF_OTHERS},
        }
        for (method, _, widths), row in zip(cases, found.values(), strict=True)
    ]


def float_row(lab: Lab) -> Row:
    """The row of the float model."""
    return {"key": "float", "method": "Full precision", "at": "32/32", **lab.float_row()}


def _keys(found: Sequence[Found]) -> list[tuple[str, str]]:
    """All rows of all models, in the order of the first that has each."""
    return list(
        dict.fromkeys((row["key"], row["at"]) for one in found for row in one["result"]["rows"])
    )


def score_table(
    name: str,
    caption: str,
    found: Sequence[Found],
    published: Scores,
    *,
    measures: Sequence[Measure] = (TOP1,),
    notes: Sequence[str] = (),
) -> Table:
    """Methods in rows; for each model its measures, and what the paper has for it.

    With one model there are intervals, widths and file size beside them; with several, means.
    """
    rows = {
        (one["label"], row["key"], row["at"]): row for one in found for row in one["result"]["rows"]
    }
    labels = [one["label"] for one in found]
    keys = _keys(found)
    alone = len(labels) == 1
    there = [label for label in labels if any(label in published.get(key, {}) for key in keys)]
    columns = [Column("method"), Column("W/A")]
    for label in labels:
        columns += [
            part
            for measure in measures
            for part in (
                Column(measure.title, "" if alone else label, measure.form),
                *([Column("95 %")] if alone and measure.interval else []),
            )
        ]
    if not alone:
        columns += [Column(f"mean {m.title}", "", m.form) for m in measures]
    for label in there:
        group = PAPER if alone else f"{label}, {PAPER}"
        columns += [Column(measure.title, group, measure.form) for measure in measures]
    if alone:
        columns += [Column("weight bits", "", ".3g"), Column("file [MB]", "", ".3f")]
    body = [_body(key, rows, labels, there, published, measures) for key in keys]
    at = [widths for _, widths in keys]
    rules = tuple(i for i in range(1, len(at)) if at[i] != at[i - 1])
    return Table(name, caption, tuple(columns), tuple(body), rules, (*notes, *remarks(found)))


def _body(
    key: tuple[str, str],
    rows: Mapping[tuple[str, str, str], Row],
    labels: Sequence[str],
    there: Sequence[str],
    published: Scores,
    measures: Sequence[Measure],
) -> tuple[Cell, ...]:
    mine = [rows.get((label, *key), {}) for label in labels]
    alone = len(labels) == 1
    first = next(row for row in mine if row)
    cells: list[Cell] = [first["method"], key[1] + (" mixed" if first.get("mixed") else "")]
    for row in mine:
        for measure in measures:
            cells.append("failed" if "error" in row else row.get(measure.key))
            if alone and measure.interval:
                interval = row.get(measure.interval)
                cells.append(None if interval is None else f"±{interval:.2f}")
    if not alone:
        for measure in measures:
            values = [row[measure.key] for row in mine if measure.key in row]
            cells.append(sum(values) / len(values) if len(values) == len(mine) else None)
    for label in there:
        cells += published.get(key, {}).get(label) or (None,) * len(measures)
    if alone:
        size = first.get("file_bytes")
        cells += [first.get("mean_weight_bits"), None if size is None else size / 1e6]
    return tuple(cells)


def remarks(found: Sequence[Found]) -> list[str]:
    """Errors and notices, each with the row it belongs to."""
    said, notices = [], []
    for one in found:
        for row in one["result"]["rows"]:
            name = f"{row['method']} {row['at']}"
            name += f" on {one['label']}" if len(found) > 1 else ""
            if "error" in row:
                said.append(f"{name} failed: {row['error']}.")
            notices += [(name, notice) for notice in row.get("notices", ())]
    return said + told_once(notices)


def draw_scores(
    figure: Any, found: Sequence[Found], published: Scores, measure: Measure = TOP1
) -> None:
    """Bars of every method, a panel for each width and model; diamonds are the paper's numbers."""
    widths = [at for at in dict.fromkeys(at for _, at in _keys(found)) if at != "32/32"]
    panels = figure.subplots(len(found), len(widths), squeeze=False, sharex=True)
    for one, line in zip(found, panels, strict=True):
        rows = [row for row in one["result"]["rows"] if measure.key in row]
        whole = next((row[measure.key] for row in rows if row["at"] == "32/32"), None)
        for at, panel in zip(widths, line, strict=True):
            most = max((row[measure.key] + _interval(row, measure) for row in rows), default=0.0)
            panel.set_xlim(0, 1.25 * most or 1.0)
            _bars(panel, [row for row in rows if row["at"] == at], measure)
            shown = [published.get((row["key"], at), {}).get(one["label"]) for row in rows]
            here = [value for row, value in zip(rows, shown, strict=True) if row["at"] == at]
            points = [(value[0], i) for i, value in enumerate(here) if value is not None]
            if points:
                x, y = zip(*points, strict=True)
                panel.scatter(x, y, marker="D", s=22, color="white", edgecolor=BLACK, zorder=3)
            if whole is not None:
                panel.axvline(whole, color=BLACK, linewidth=1, linestyle="--")
            panel.set_title(f"{one['label']}\n{at} bits; dashed: float", loc="left")
            panel.set_xlabel(measure.title)


def _interval(row: Row, measure: Measure) -> float:
    return float(row[measure.interval]) if measure.interval else 0.0


def _bars(panel: Any, rows: Sequence[Row], measure: Measure) -> None:
    values = [row[measure.key] for row in rows]
    spread = [_interval(row, measure) for row in rows]
    colours = [
        BLUE if row["key"] == "lampq" else ORANGE if row.get("mixed") else GREY for row in rows
    ]
    places = range(len(rows))
    panel.barh(
        places,
        values,
        xerr=spread,
        color=colours,
        height=0.72,
        error_kw={"elinewidth": 1, "ecolor": BLACK, "capsize": 2},
    )
    # beside each other at the right end, where neither bars nor the line of the float model are
    for place, value in enumerate(values):
        text = format(value, measure.form)
        panel.text(panel.get_xlim()[1], place, text, ha="right", va="center", fontsize=8.5)
    panel.set_yticks(places, [row["method"] for row in rows])
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)

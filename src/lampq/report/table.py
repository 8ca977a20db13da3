"""The rows of a comparison as JSON, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from lampq.report import STAGES, versions

Row = dict[str, Any]
TABLE_VERSION = 1
COLUMNS = (
    "method",
    "plan",
    "bits",
    "reconstruct",
    "seed",
    "top-1 [%]",
    "95 %",
    "weight bits",
    "input bits",
    "file [MB]",
    "smaller",
    "seconds",
)
SPREAD_COLUMNS = ("method", "plan", "bits", "reconstruct", "seeds", "mean top-1 [%]", "min..max")
FLAT = (
    *("method", "plan", "bits", "seed", "reconstruct", "top1", "interval95", "images"),
    *("mean_weight_bits", "mean_activation_bits", "file_bytes", "smaller", "seconds"),
)


def table_json(rows: Sequence[Row], *, about: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """The content of table.json; its keys are stable."""
    return {
        "table_version": TABLE_VERSION,
        **about,
        "preset": preset,
        "versions": versions(),
        "rows": list(rows),
        "seeds": spread(rows),
    }


def spread(rows: Sequence[Row]) -> list[Row]:
    """Mean and range of the accuracy over the seeds, where there are several."""
    names = ("method", "plan", "bits", "reconstruct")
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if "error" not in row and row["seed"] is not None:
            found.setdefault(tuple(row[name] for name in names), []).append(row["top1"])
    return [
        {
            **dict(zip(names, key, strict=True)),
            "seeds": len(scores),
            "mean": sum(scores) / len(scores),
            "min": min(scores),
            "max": max(scores),
        }
        for key, scores in found.items()
        if len(scores) > 1
    ]


def _names(row: Row) -> tuple[str, str, str, str]:
    return row["method"], row["plan"] or "", f"{row['bits']:g}", row["reconstruct"] or ""


def cells(row: Row) -> tuple[str, ...]:
    """A row as it is shown, by the columns; a failed one has its sentence elsewhere."""
    names = (*_names(row), "" if row["seed"] is None else str(row["seed"]))
    if "error" in row:
        return (*names, "failed", "", "", "", "", "", f"{row['seconds']:.1f}")
    return (
        *names,
        f"{row['top1']:.2f}",
        f"±{row['interval95']:.2f}",
        f"{row['mean_weight_bits']:.4g}",
        f"{row['mean_activation_bits']:.4g}",
        f"{row['file_bytes'] / 1e6:.3f}",
        f"{row['smaller']:.1f}x",
        f"{row['seconds']:.1f}",
    )


def spread_cells(row: Row) -> tuple[str, ...]:
    """Mean and range of several seeds as they are shown."""
    scores = f"{row['mean']:.2f}", f"{row['min']:.2f}..{row['max']:.2f}"
    return (*_names(row), str(row["seeds"]), *scores)


def remarks(rows: Sequence[Row]) -> list[str]:
    """Errors and notices, each with the trial it belongs to."""
    found = []
    for row in rows:
        name = " ".join(filter(None, _names(row))) + f" seed {row['seed']}"
        if "error" in row:
            found.append(f"{name} failed: {row['error']}")
        found += [f"{name}: {notice}" for notice in row.get("notices", ())]
    return found


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


def table_markdown(table: Mapping[str, Any]) -> str:
    """The table for people."""
    rows = table["rows"]
    images = next((f" on {row['images']} images" for row in rows if "images" in row), "")
    lines = [f"# {table['model']['name']}, preset {table['preset']}: top-1{images}", ""]
    lines += markdown_table(COLUMNS, [cells(row) for row in rows])
    lines += ["", "Seconds are those of the trial itself: what earlier trials left is not counted."]
    if table["seeds"]:
        lines += ["", "## Over seeds", ""]
        lines += markdown_table(SPREAD_COLUMNS, [spread_cells(row) for row in table["seeds"]])
    noted = remarks(rows)
    if noted:
        lines += ["", "## Notes", "", *(f"- {note}" for note in noted)]
    return "\n".join(lines) + "\n"


def table_csv(rows: Sequence[Row]) -> str:
    """The rows with nested values in columns of their own; what a row has not is empty."""
    text = io.StringIO()
    qualities = ("accuracy", "likelihood", "agreement")
    nested = [f"seconds_{stage}" for stage in STAGES] + [f"calibration_{q}" for q in qualities]
    writer = csv.DictWriter(text, (*FLAT, *nested, "notices", "error"), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        stages, quality = row.get("seconds_by_stage") or {}, row.get("calibration") or {}
        writer.writerow(
            {
                **{name: row.get(name) for name in FLAT},
                **{f"seconds_{stage}": value for stage, value in stages.items()},
                **{f"calibration_{name}": value for name, value in quality.items()},
                "notices": "; ".join(row.get("notices", ())),
                "error": row.get("error"),
            }
        )
    return text.getvalue()

"""The results of a sweep: one table in an SQLite file, and what is printed of it."""

from __future__ import annotations

import csv
import io
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from lampq.errors import ConfigError, FormatError
from lampq.evaluate import interval95
from lampq.report import STAGES
from lampq.report.table import Row, markdown_table
from lampq.sweep.asked import INPUTS, OPTIONS, Trial
from lampq.version import __version__

FILE = "sweep.sqlite"
SCORES = {
    "kl": "calibration_agreement",
    "loss": "calibration_likelihood",
    "accuracy": "calibration_accuracy",
}
Score = Literal["kl", "loss", "accuracy"]
TEXT, REAL, WHOLE = "TEXT", "REAL", "INTEGER"
COLUMNS: dict[str, str] = {
    **{"trial": "TEXT PRIMARY KEY", "name": TEXT, "folder": TEXT, "status": TEXT, "failure": TEXT},
    **{name: REAL if name == "crop_pct" else TEXT for name in INPUTS},
    **dict.fromkeys(OPTIONS, ""),
    **dict.fromkeys(SCORES.values(), REAL),
    **{"top1": REAL, "interval95": REAL, "images_scored": WHOLE},
    **{"uniform_top1": REAL, "fp32_top1": REAL},
    **{"mean_weight_bits": REAL, "mean_activation_bits": REAL},
    **{"file_bytes": WHOLE, "smaller": REAL, "seconds": REAL},
    **{f"seconds_{stage}": REAL for stage in STAGES},
    **{"notices": TEXT, "traceback": TEXT, "attempts": WHOLE, "worker": TEXT, "ended": REAL},
    "lampq": TEXT,
}
# options that say what is asked of a trial: only those that agree on them can be better or worse
BUDGET = ("model", "weights", "bits", "act_bits", "target_size", "target_bops", "profile")


def _cell(value: Any) -> Any:
    """A value as SQLite has it: lists with commas between."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return int(value) if isinstance(value, bool) else value


def _asked(trial: Trial) -> Row:
    effective = trial.config.to_json()
    return {
        "trial": trial.key,
        "name": trial.name,
        **trial.inputs,
        **{name: _cell(effective[name]) for name in OPTIONS},
        "lampq": __version__,
    }


def finished_row(trial: Trial, report: Mapping[str, Any], folder: str) -> Row:
    """The row of a finished run, from its report."""
    calibration = report["calibration"]
    quality = calibration.get("reconstructed", calibration["mixed"])
    scores, size = report["scores"], report["files"]["model.safetensors"]
    tops = {name: score["top1"] for name, score in scores.items()}
    images = scores["mixed"]["images"] if scores else None
    return {
        **_asked(trial),
        "folder": folder,
        "status": "finished",
        **{column: quality[column.removeprefix("calibration_")] for column in SCORES.values()},
        "top1": tops.get("mixed"),
        "interval95": interval95(tops["mixed"], images) if images else None,
        "images_scored": images,
        "uniform_top1": tops.get("uniform"),
        "fp32_top1": tops.get("fp32"),
        "mean_weight_bits": report["plan"]["mean_weight_bits"],
        "mean_activation_bits": report["plan"]["mean_activation_bits"],
        "file_bytes": size,
        "smaller": report["float_bytes"] / size,
        **{f"seconds_{stage}": seconds for stage, seconds in report["seconds"].items()},
        "notices": "; ".join(report["notices"]),
    }


def failed_row(trial: Trial, failure: str, traceback: str | None = None) -> Row:
    """The row of a trial that came to no end."""
    return {**_asked(trial), "status": "failed", "failure": failure, "traceback": traceback}


class Results:
    """The table ``trials`` of a file; one process writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path)
        connection.row_factory = sqlite3.Row
        return connection

    def create(self) -> None:
        """Make the table if it is not there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        columns = ", ".join(f'"{name}" {kind}'.strip() for name, kind in COLUMNS.items())
        with closing(self._connect()) as connection, connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS trials ({columns})")

    def put(self, row: Row) -> None:
        """Add the row of a trial, or replace it."""
        names = [name for name in COLUMNS if name in row]
        columns = ", ".join(f'"{name}"' for name in names)
        marks = ", ".join("?" * len(names))
        with closing(self._connect()) as connection, connection:
            connection.execute(
                f"INSERT OR REPLACE INTO trials ({columns}) VALUES ({marks})",
                [row[name] for name in names],
            )

    def rows(self) -> list[Row]:
        """All rows, in the order in which they came."""
        try:
            with closing(self._connect()) as connection:
                found = connection.execute("SELECT * FROM trials ORDER BY rowid").fetchall()
        except sqlite3.DatabaseError as error:
            raise FormatError(f"{str(self.path)!r} is no table of a sweep: {error}") from error
        return [dict(row) for row in found]


def read_results(out: Path) -> list[Row]:
    """The rows of a sweep."""
    if not (out / FILE).is_file():
        raise ConfigError(f"{str(out)!r} holds no sweep: it has no {FILE}")
    return Results(out / FILE).rows()


def best(rows: Sequence[Row], by: str = "kl") -> list[Row]:
    """For each model and budget the trial of the best score on calibration images.

    ``by``: "kl" (divergence from the float model), "loss" or "accuracy". The accuracy on evaluation
    images is never looked at. The first of equals is taken.
    """
    if by not in SCORES:
        raise ConfigError(f"unknown score {by!r}; known: {', '.join(SCORES)}")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["status"] == "finished":
            groups.setdefault(tuple(row[name] for name in BUDGET), []).append(row)
    if not groups:
        raise ConfigError("no trial of the sweep is finished: there is no best one")
    return [max(some, key=lambda row: row[SCORES[by]]) for some in groups.values()]


def varied_columns(rows: Sequence[Row]) -> list[str]:
    """The inputs and options in which rows differ."""
    return [n for n in (*INPUTS, *OPTIONS) if len({row[n] for row in rows}) > 1]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def cells(rows: Sequence[Row], varied: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows as they are shown; a failed trial has its sentence elsewhere."""
    columns = [*varied, "calib KL", "top-1 [%]", "95 %", "weight bits", "file [MB]", "seconds"]
    shown = []
    for row in rows:
        names = [_shown(row[name]) for name in varied]
        seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f}"
        if row["status"] == "failed":
            shown.append([*names, "failed", "", "", "", "", seconds])
            continue
        top1 = row["top1"]
        shown.append(
            [
                *names,
                f"{-row['calibration_agreement']:.4g}",
                "-" if top1 is None else f"{top1:.2f}",
                "-" if top1 is None else f"±{row['interval95']:.2f}",
                f"{row['mean_weight_bits']:.4g}",
                f"{row['file_bytes'] / 1e6:.3f}",
                seconds,
            ]
        )
    return columns, shown


def remarks(rows: Sequence[Row]) -> list[str]:
    """What went wrong, each with its trial."""
    return [f"{row['name']} failed: {row['failure']}" for row in rows if row["status"] == "failed"]


def results_csv(rows: Sequence[Row]) -> str:
    """All columns but the tracebacks."""
    text = io.StringIO()
    names = [name for name in COLUMNS if name != "traceback"]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def results_markdown(rows: Sequence[Row]) -> str:
    """The table for people, and the best trial of each budget by its calibration score."""
    columns, shown = cells(rows, varied_columns(rows))
    lines = ["# Sweep", "", *markdown_table(columns, shown), ""]
    if any(row["status"] == "finished" for row in rows):
        lines.append("Best on calibration images (KL divergence), one for each model and budget:")
        lines += ["", *(f"- `{row['folder']}`" for row in best(rows)), ""]
    lines += [f"- {remark}" for remark in remarks(rows)]
    return "\n".join(lines).rstrip("\n") + "\n"

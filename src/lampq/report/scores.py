"""Scores as reports show them: accuracies of classifiers, average precisions of detectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lampq.evaluate import interval95

Json = dict[str, Any]
SIZES = {"ap": "all", "ap50": "overlap 0.5", "ap75": "overlap 0.75"}
SIZES |= {name: f"{name} objects" for name in ("small", "medium", "large")}


def parts(score: Mapping[str, Any]) -> Json:
    """The numbers of a score by their titles, in percent; the first is the main one."""
    if "top1" in score:
        return {"top-1 [%]": score["top1"]}
    return {f"{kind} AP [%]": percent(score[kind]["ap"]) for kind in ("box", "mask")}


def percent(share: float | None) -> float | None:
    """A share of one in percent; None where there is nothing to find."""
    return None if share is None else 100 * share


def interval(score: Mapping[str, Any]) -> float | None:
    """Half the 95 % interval of an accuracy; an average precision has none."""
    return interval95(score["top1"], int(score["images"])) if "top1" in score else None


def shown(value: float | None) -> str:
    """A number in percent as tables have it."""
    return "-" if value is None else f"{value:.2f}"


def markdown(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lines of the scores for people."""
    titles = next((list(parts(score)) for score in scores.values()), ["top-1 [%]"])
    sure = all(interval(score) is not None for score in scores.values())
    columns = ["model", *titles, *(["95 % interval"] if sure else []), "images"]
    lines = _table(columns)
    for name, score in scores.items():
        half = interval(score)
        known = [f"±{half:.2f}"] if sure and half is not None else []
        cells = [name, *map(shown, parts(score).values()), *known, str(score["images"])]
        lines.append(f"| {' | '.join(cells)} |")
    if scores and not sure:
        lines += ["", *_detailed(scores)]
    return lines


def _table(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def _detailed(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Average precisions by overlap, size and class."""
    columns, rows = detailed(scores)
    lines = ["## AP [%] by size and class", "", *_table(columns)]
    return lines + [f"| {' | '.join([name, *map(shown, values)])} |" for name, *values in rows]


def detailed(scores: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table of all average precisions in percent; empty for accuracies."""
    found = {name: score for name, score in scores.items() if "box" in score}
    if not found:
        return [], []
    columns = ["of"] + [f"{name} {kind}" for kind in ("box", "mask") for name in found]
    some = next(iter(found.values()))["box"]

    def row(title: str, *keys: str) -> list[Any]:
        values = []
        for kind in ("box", "mask"):
            for score in found.values():
                value = score[kind]
                for key in keys:
                    value = value[key]
                values.append(percent(value))
        return [title, *values]

    rows = [row(title, key) for key, title in SIZES.items()]
    return columns, rows + [row(name, "per_class", name) for name in some["per_class"]]


def measured(report: Mapping[str, Any]) -> Json:
    """What the page shows of the quality of the models: on evaluation or on calibration images."""
    scores = report["scores"]
    if "mixed" in scores:
        axis = next(iter(parts(scores["mixed"])))
        title = "Accuracy, top-1" if "top1" in scores["mixed"] else "Box AP"
        values = {
            name: {"value": parts(score)[axis], "interval": interval(score)}
            for name, score in scores.items()
        }
        images = scores["mixed"]["images"]
        return {"title": title, "axis": axis, "unit": " %", "images": images, "values": values}
    qualities = report["calibration"]
    key, title, axis, unit, sign = _calibrated(qualities["mixed"])
    values = {
        name: {"value": sign * quality[key], "interval": None}
        for name, quality in qualities.items()
    }
    title = f"{title}, calibration"
    return {"title": title, "axis": axis, "unit": unit, "images": None, "values": values}


def _calibrated(quality: Mapping[str, Any]) -> tuple[str, str, str, str, int]:
    """The part of a quality to show: its key, title, axis, unit and sign."""
    if "accuracy" in quality:
        return "accuracy", "Accuracy", "top-1 [%]", " %", 1
    if quality.get("ap") is not None:
        return "ap", "AP", "AP of boxes and masks [%]", " %", 1
    return "likelihood", "Loss", "loss", "", -1

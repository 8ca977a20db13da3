"""Time of the base method, of VT-PTQ's allocation and of LampQ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch

from lampq.compare import Trial, check, quantized
from lampq.evaluate import predict
from lampq.reproduce.lab import Lab, Row
from lampq.reproduce.part import Found, Part, base_of
from lampq.reproduce.pictures import BLACK, BLUE, GREY, ORANGE
from lampq.reproduce.published import RUNTIME
from lampq.reproduce.table import Cell, Column, Table
from lampq.scoring import Run

METHODS = {
    "base": ("Base", "uniform"),
    "vtptq": ("VT-PTQ", "vtptq"),
    "lampq": ("LampQ", "lampq"),
}
WHOLE = "every configuration quantized"
NOTES = (
    "Each run starts from nothing: no fit or measurement is shared. The score on evaluation images "
    "is not part of it. Ratios are of processor time, which other work on the machine hardly "
    "changes.",
    "VT-PTQ in the paper quantizes and tests every configuration it draws; its published time "
    "amounts to 519 runs of AdaLog. lampq measures each module once at every width and adds up. "
    "The row 'VT-PTQ, every configuration quantized' is calculated: configurations times the base.",
)


def compute(lab: Lab) -> Found:
    """Seconds of each method from nothing, and those of VT-PTQ as it was published."""
    bits = lab.bits(3)[0]
    trials = {key: lab.trial(plan, bits) for key, (_, plan) in METHODS.items()}
    check(lab.loaded, tuple(trials.values()))
    rows = []
    for key, trial in trials.items():
        row = lab.journal.once(_key(trial), partial(_timed, lab, trial))
        lab.progress().note(f"  {METHODS[key][0]}: {row['cpu_seconds']:.1f} s of processor time")
        rows.append({"key": key, "method": METHODS[key][0], **row})
    configurations = trials["vtptq"].config.configurations
    return {
        "rows": rows,
        "at": f"{bits:g}/{bits:g}",
        "configurations": configurations,
        "threads": torch.get_num_threads(),
    }


def _key(trial: Trial) -> str:
    text = json.dumps(trial.config.to_json(), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return f"time {torch.get_num_threads()} {digest}"


def _timed(lab: Lab, trial: Trial) -> Row:
    samples = lab.calibration(trial.seed)
    predict(lab.loaded.model, samples.subset(32, 0))  # what only the first pass costs
    progress = lab.progress()
    wall, cpu = perf_counter(), process_time()
    quantized(lab.loaded, samples, trial.config, Run(progress))
    return {
        "seconds": perf_counter() - wall,
        "cpu_seconds": process_time() - cpu,
        "stages": dict(progress.seconds),
    }


def _published(label: str) -> dict[str, float]:
    if label not in RUNTIME:
        return {}
    base, whole, ours = RUNTIME[label]
    return {"base": base, WHOLE: whole, "lampq": ours}


def _ratios(one: Found) -> list[tuple[str, str, float | None, float, float]]:
    """Key, method, seconds, processor seconds and ratio to the base, of every row."""
    result = one["result"]
    base = result["rows"][0]["cpu_seconds"]
    rows: list[tuple[str, str, float | None, float, float]] = [
        (r["key"], r["method"], r["seconds"], r["cpu_seconds"], r["cpu_seconds"] / base)
        for r in result["rows"]
    ]
    times = result["configurations"]
    return [*rows, (WHOLE, f"VT-PTQ, {WHOLE}", None, times * base, float(times))]


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Seconds and ratios of each model, beside those of the paper."""
    known = any(one["label"] in RUNTIME for one in found)
    rows: list[tuple[Cell, ...]] = []
    rules = []
    for one in found:
        rules.append(len(rows))
        printed = _published(one["label"])
        for key, method, wall, cpu, ratio in _ratios(one):
            theirs = printed.get(key)
            rows.append(
                (
                    one["label"],
                    method,
                    one["result"]["at"],
                    wall,
                    cpu,
                    ratio,
                    *([theirs, theirs / printed["base"] if theirs else None] if known else []),
                )
            )
    columns = (
        *(Column(name) for name in ("model", "method", "W/A")),
        *(Column(name, "", ".1f") for name in ("seconds", "processor seconds", "x base")),
        *([Column("seconds", "published", ".1f"), Column("x base", "published", ".1f")] * known),
    )
    threads = found[0]["result"]["threads"]
    how = f"{threads} thread{'s' if threads > 1 else ''}, {found[0]['processor']}"
    notes = (*NOTES, f"The base is `{base_of(found[0])}`. {how}.")
    caption = "Time to quantize, from nothing to the model."
    return (Table("runtime", caption, columns, tuple(rows), tuple(rules), notes),)


def draw(figure: Any, found: Sequence[Found]) -> None:
    """Bars of time in multiples of the base method, on a logarithmic axis."""
    panels = figure.subplots(len(found), 1, squeeze=False, sharex=True)[:, 0]
    for panel, one in zip(panels, found, strict=True):
        rows = _ratios(one)
        names = [method for _, method, *_ in rows]
        values = [ratio for *_, ratio in rows]
        colours = [GREY, ORANGE, BLUE, "white"]
        places = range(len(rows))
        panel.barh(places, values, color=colours, height=0.7, left=0)
        panel.barh(
            places[-1:], values[-1:], color="white", edgecolor=ORANGE, hatch="///", height=0.7
        )
        for place, value in enumerate(values):
            panel.text(value, place, f" {value:.3g}x", va="center", fontsize=8.5)
        panel.set_yticks(places, [*names[:-1], "VT-PTQ, every\nconfiguration (calculated)"])
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set_xscale("log")
        panel.set_xlim(0.7, 4 * max(values))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.axvline(1, color=BLACK, linewidth=0.8)
        panel.set_title(f"{one['label']}, {one['result']['at']} bits", loc="left")
    panels[-1].set_xlabel("processor time in multiples of the base method")


PART = Part(
    name="runtime",
    place="Table 10",
    title="time of the base method, VT-PTQ's allocation and LampQ",
    models=("ViT-S", "DeiT-S", "Swin-S"),
    compute=compute,
    tables=tables,
    draw=draw,
    size=(6.4, 2.3),
    scored=False,
    joined=True,
)

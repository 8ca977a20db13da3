"""LampQ over the ranges that the paper searched, one hyper-parameter at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lampq.reproduce.lab import Lab
from lampq.reproduce.part import Found, Part, told_once
from lampq.reproduce.pictures import BLUE, GREY, ORANGE
from lampq.reproduce.published import BETAS, CHOICES, GAMMAS, MUS
from lampq.reproduce.table import Column, Table

RANGES: dict[str, tuple[Any, ...]] = {"gamma": GAMMAS, "beta": BETAS, "mu": MUS, "choices": CHOICES}
SIGNS = {"gamma": r"$\gamma$", "beta": r"$\beta$", "mu": r"$\mu$", "choices": "choices"}


def compute(lab: Lab) -> Found:
    """Accuracies on calibration and evaluation images for every value of every range."""
    bits = lab.bits(3)[0]
    cases = [(name, value) for name, values in RANGES.items() for value in values]
    trials = {
        f"{name} = {_text(value)}": lab.trial("lampq", bits, {name: value}) for name, value in cases
    }
    rows = lab.run(trials)
    own = lab.trial("lampq", bits).config
    default = {name: getattr(own, name) for name in ("gamma", "beta", "mu")}
    default["choices"] = tuple(bits.weight for bits in own.widths)
    return {
        "bits": bits,
        "notices": [[name, said] for name, row in rows.items() for said in row.get("notices", ())],
        "rows": [
            {
                "parameter": name,
                "value": _text(value),
                "default": value == default[name],
                "exchanges": row.get("exchanges"),
                **{key: row[key] for key in KEPT if key in row},
            }
            for (name, value), row in zip(cases, rows.values(), strict=True)
        ],
    }


KEPT = ("calibration", "top1", "interval95", "mean_weight_bits", "error")


def _text(value: Any) -> str:
    return "{" + ", ".join(map(str, value)) + "}" if isinstance(value, tuple) else f"{value:g}"


def _best(rows: Sequence[dict[str, Any]], parameter: str) -> str | None:
    """The value of highest accuracy on the calibration images, the first of equals."""
    own = [row for row in rows if row["parameter"] == parameter and "calibration" in row]
    return max(own, key=lambda row: float(row["calibration"]))["value"] if own else None


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """One row for each value."""
    (one,) = found
    rows = one["result"]["rows"]
    body = tuple(
        (
            row["parameter"],
            row["value"] + (" (default)" if row["default"] else ""),
            "failed" if "error" in row else row["calibration"],
            row.get("top1"),
            f"±{row['interval95']:.2f}" if "interval95" in row else None,
            "{} of {}".format(*row["exchanges"]) if row["exchanges"] else None,
            "✓" if row["value"] == _best(rows, row["parameter"]) else None,
        )
        for row in rows
    )
    columns = tuple(
        Column(name)
        for name in (
            "hyper-parameter",
            "value",
            "on calibration images [%]",
            "top-1 [%]",
            "95 %",
            "exchanges",
            "best on calibration images",
        )
    )
    names = [row["parameter"] for row in rows]
    rules = tuple(i for i in range(1, len(names)) if names[i] != names[i - 1])
    notes = (
        "One value is changed at a time, all others are the default; mu is a share of the blocks. "
        "The last column is the choice that may be made: on calibration images, never on those of "
        "the score.",
        *(
            f"{row['parameter']} = {row['value']} failed: {row['error']}"
            for row in rows
            if "error" in row
        ),
        *told_once((name, said) for name, said in one["result"]["notices"]),
    )
    caption = f"LampQ at {one['result']['bits']:g} bits over the ranges of its hyper-parameters."
    return (Table("hyperparameters", caption, columns, body, rules, notes),)


def draw(figure: Any, found: Sequence[Found]) -> None:
    """A panel for each hyper-parameter: accuracy on evaluation and on calibration images."""
    rows = [row for row in found[0]["result"]["rows"] if "top1" in row]
    panels = figure.subplots(1, len(RANGES), sharey=True, width_ratios=[7, 4, 4, 5])
    for panel, name in zip(panels, RANGES, strict=True):
        own = [row for row in rows if row["parameter"] == name]
        places = range(len(own))
        panel.errorbar(
            places,
            [row["top1"] for row in own],
            yerr=[row["interval95"] for row in own],
            color=BLUE,
            marker="o",
            capsize=2,
            elinewidth=1,
            label="evaluation images, 95 %",
        )
        calibration = [row["calibration"] for row in own]
        panel.plot(places, calibration, color=ORANGE, marker="D", ls="--", label="calibration")
        for place, row in zip(places, own, strict=True):
            if row["default"]:
                panel.axvline(place, color=GREY, linewidth=1, linestyle=":", zorder=0)
        panel.set_xticks(places, [row["value"].replace(", ", "") for row in own])
        if name == "choices":
            panel.tick_params(axis="x", rotation=30)
        panel.set_xlabel(SIGNS[name])
    panels[0].set_ylabel("top-1 [%]")
    names = panels[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside upper left", ncols=2)


PART = Part(
    name="hyperparameters",
    place="Table 8",
    title="accuracy over the ranges of gamma, beta, mu and the choices",
    models=("DeiT-S",),
    compute=compute,
    tables=tables,
    draw=draw,
    size=(8.8, 3.0),
)

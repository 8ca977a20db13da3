"""What each of the paper's three ideas brings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lampq.reproduce.lab import Lab
from lampq.reproduce.part import Found, Part, base_of
from lampq.reproduce.published import ABLATION
from lampq.reproduce.scores import Method, draw_scores, float_row, measured, remarks, wanted
from lampq.reproduce.table import Column, Table

METHODS = (
    Method("base", "Base", "uniform", {}),
    Method("vtptq", "Base + VT-PTQ", "vtptq", {}, mixed=True),
    Method("i1+i2", "Base + I1 + I2", "fisher", {}, mixed=True),
    Method("i1+i3", "Base + I1 + I3", "uniform+exchanges", {}, mixed=True),
    Method("lampq", "LampQ", "lampq", {}, mixed=True),
)
# mixed precision, layer-wise widths, type-aware Fisher metric, exchanges
IDEAS = {
    "base": (False, False, False, False),
    "vtptq": (True, False, False, False),
    "i1+i2": (True, True, True, False),
    "i1+i3": (True, True, False, True),
    "lampq": (True, True, True, True),
}
NOTES = (
    "MPQ: mixed precision; I1: widths by layer; I2: type-aware Fisher metric; I3: exchanges.",
    "The paper does not say what stands in for the metric in I1 + I3: here exchanges start from "
    "the uniform plan.",
)


def compute(lab: Lab) -> Found:
    """Rows of the base method, of VT-PTQ, and of LampQ with and without its ideas."""
    methods = wanted(METHODS, lab.asked.rows)
    cases = [(m, bits, f"{bits:g}/{bits:g}") for bits in lab.bits(3) for m in methods]
    return {"rows": [float_row(lab), *measured(lab, cases)]}


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Ideas in columns, as in the paper."""
    (one,) = found
    rows = [row for row in one["result"]["rows"] if row["key"] != "float"]
    printed = {
        (row["key"], row["at"]): ABLATION.get((row["key"], row["at"]), {}).get(one["label"])
        for row in rows
    }
    known = any(printed.values())
    whole = one["result"]["rows"][0]
    body = tuple(
        (
            row["method"],
            row["at"],
            *("✓" if idea else None for idea in IDEAS[row["key"]]),
            "failed" if "error" in row else row["top1"],
            None if "error" in row else f"±{row['interval95']:.2f}",
            row.get("calibration"),
            None if "error" in row else "{} of {}".format(*row["exchanges"]),
            *([(printed[row["key"], row["at"]] or (None,))[0]] if known else []),
        )
        for row in rows
    )
    columns = (
        *(Column(name) for name in ("method", "W/A", "MPQ", "I1", "I2", "I3")),
        *(Column(name) for name in ("top-1 [%]", "95 %", "on calibration images", "exchanges")),
        *([Column("published")] if known else []),
    )
    about = f"The base is `{base_of(one)}`. The float model has {whole['top1']:.2f} %."
    notes = (*NOTES, about, *remarks(found))
    return (Table("ablation", "The ideas of LampQ one by one.", columns, body, (), notes),)


PART = Part(
    name="ablation",
    place="Table 6",
    title="what each idea of LampQ brings at 3 bits",
    models=("DeiT-S",),
    compute=compute,
    tables=tables,
    draw=partial(draw_scores, published=ABLATION),
    size=(5.4, 2.6),
    rows=tuple(IDEAS),
)

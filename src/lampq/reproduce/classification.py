"""Accuracy of every method on images: the paper's first table of results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lampq.reproduce.lab import Lab
from lampq.reproduce.part import Found, Part
from lampq.reproduce.published import CLASSIFICATION
from lampq.reproduce.scores import Method, draw_scores, float_row, measured, score_table, wanted
from lampq.reproduce.table import Table

# in the order of the paper; QDrop and PD-Quant train uniform grids from ranges of least error
METHODS = (
    Method("qdrop", "QDrop", "uniform", {"method": "mse", "reconstruct": "qdrop"}),
    Method("ptq4vit", "PTQ4ViT", "uniform", {"method": "ptq4vit"}),
    Method("pdquant", "PD-Quant", "uniform", {"method": "mse", "reconstruct": "pdquant"}),
    Method("repq", "RepQ-ViT", "uniform", {"method": "repq"}),
    Method("optq", "OPTQ", "uniform", {"method": "gptq"}),
    Method("erq", "ERQ", "uniform", {"method": "erq"}),
    Method("adalog", "AdaLog", "uniform", {"method": "adalog"}),
    Method("vtptq", "VT-PTQ on AdaLog", "vtptq", {"method": "adalog"}, mixed=True),
    Method("lampq", "LampQ", "lampq", {"method": "adalog"}, mixed=True),
)
NOT_AT_3 = ("pdquant", "optq", "erq")
NOTES = (
    "QDrop and PD-Quant start from ranges of least error (`mse`) and train {iterations} steps a "
    "block; published, 20,000.",
    "VT-PTQ is its allocation only, on AdaLog, as in the paper. What else differs from the "
    "published methods is in the architecture page, under Deviations.",
)


def compute(lab: Lab) -> Found:
    """Rows of the float model and of every method at every width."""
    methods = wanted(METHODS, lab.asked.rows)
    cases = [
        (method, bits, f"{bits:g}/{bits:g}")
        for bits in lab.bits(4, 3)
        for method in methods
        # the paper has no such rows; asked for by name they are run
        if bits != 3 or lab.asked.rows or method.key not in NOT_AT_3
    ]
    rows = measured(lab, cases)
    return {"rows": [float_row(lab), *rows]}


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Methods in rows, models in columns."""
    iterations = found[0]["asked"]["options"].get("iterations") or 500
    notes = [note.format(iterations=iterations) for note in NOTES]
    caption = "Image classification accuracy of quantized models."
    return (score_table("classification", caption, found, CLASSIFICATION, notes=notes),)


PART = Part(
    name="classification",
    place="Table 3",
    title="accuracy of all methods at 4 and 3 bits",
    models=("ViT-S", "ViT-B", "DeiT-T", "DeiT-S", "DeiT-B", "Swin-S", "Swin-B"),
    compute=compute,
    tables=tables,
    draw=partial(draw_scores, published=CLASSIFICATION),
    size=(7.6, 3.4),
    rows=tuple(method.key for method in METHODS),
    joined=True,
)

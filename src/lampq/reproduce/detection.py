"""Average precision of detectors: boxes and masks of float and quantized ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from lampq.progress import Progress
from lampq.reproduce.lab import Lab, Row
from lampq.reproduce.part import Found, Part
from lampq.reproduce.published import DETECTION, DETECTORS
from lampq.reproduce.scores import (
    Measure,
    Method,
    draw_scores,
    float_row,
    measured,
    score_table,
    wanted,
)
from lampq.reproduce.table import Table

if TYPE_CHECKING:
    from lampq.detection.samples import DetectionSamples

METHODS = (
    Method("repq", "RepQ-ViT", "uniform", {"method": "repq"}),
    Method("optq", "OPTQ", "uniform", {"method": "gptq"}),
    Method("erq", "ERQ", "uniform", {"method": "erq"}),
    Method("adalog", "AdaLog", "uniform", {"method": "adalog"}),
    Method("vtptq", "VT-PTQ on AdaLog", "vtptq", {"method": "adalog"}, mixed=True),
    Method("lampq", "LampQ", "lampq", {"method": "adalog"}, mixed=True),
)
# what LampQ is held against; the others are run where they are named
OWN = ("adalog", "vtptq", "lampq")
BOX, MASK = Measure("box_ap", "AP box", form=".1f"), Measure("mask_ap", "AP mask", form=".1f")
NOTES = (
    "AP in percent over overlaps of 0.5 to 0.95, as COCO defines it.",
    "The paper also has QDrop and PD-Quant, which train the model; lampq trains classifiers only.",
    "The paper has no detectors at 3 bits.",
)


def ap_row(model: nn.Module, samples: DetectionSamples, progress: Progress, label: str) -> Row:
    """Box and mask AP of a detector in percent; there must be an object in the pictures."""
    # torchvision's detectors take a while to import, and the other parts do without
    from lampq.detection.task import DetectionTask

    found = DetectionTask().score(model, samples, progress, label)
    points = {f"{kind}_ap": 100 * found[kind]["ap"] for kind in ("box", "mask")}
    return {**points, "images": found["images"]}


def compute(lab: Lab) -> Found:
    """Rows of the float detector and of every method at every width."""
    methods = wanted(METHODS, lab.asked.rows or OWN)
    cases = [(method, bits, f"{bits:g}/{bits:g}") for bits in lab.bits(4, 3) for method in methods]
    rows = measured(lab, cases)
    return {"rows": [float_row(lab), *rows]}


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Methods in rows, detectors in columns."""
    caption = "Average precision of quantized detectors."
    measures = (BOX, MASK)
    table = score_table("detection", caption, found, DETECTION, measures=measures, notes=NOTES)
    return (table,)


PART = Part(
    name="detection",
    place="Table 4",
    title="box and mask AP of detectors at 4 and 3 bits",
    models=tuple(DETECTORS),
    compute=compute,
    tables=tables,
    draw=partial(draw_scores, published=DETECTION, measure=BOX),
    size=(7.6, 2.2),
    rows=tuple(method.key for method in METHODS),
    joined=True,
    images="MS COCO 2017",
    task="detection",
)

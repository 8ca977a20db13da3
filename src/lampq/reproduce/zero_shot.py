"""Accuracy without images: calibration on pictures that PSAQ-ViT makes from the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lampq.errors import ConfigError
from lampq.models import LoadedModel
from lampq.reproduce.lab import Lab, Row
from lampq.reproduce.part import Found, Part
from lampq.reproduce.published import ZERO_SHOT
from lampq.reproduce.scores import Method, draw_scores, float_row, measured, score_table, wanted
from lampq.reproduce.table import Table
from lampq.zero_shot import Synthesis, make_folder, read_made

PSAQ = {"method": "psaq"}
METHODS = (
    Method("psaq", "PSAQ-ViT", "uniform", PSAQ),
    Method("vtptq", "VT-PTQ on PSAQ-ViT", "vtptq", PSAQ, mixed=True),
    Method("lampq", "LampQ", "lampq", PSAQ, mixed=True),
)
INPUT_BITS = 8
PICTURES = 32
FOLDER = "pictures"


def compute(lab: Lab) -> Found:
    """Rows of the float model and of every method with 4 and 8 bits for weights, 8 for inputs."""
    loaded, how = lab.loaded, lab.how
    assert isinstance(loaded, LoadedModel), "only classifiers get here"
    assert how is not None, "classifiers have it"
    methods = wanted(METHODS, lab.asked.rows)
    given = lab.bits(4, INPUT_BITS)
    if any(bits != int(bits) for bits in given):
        raise ConfigError(f"zero-shot widths are whole numbers, got {given}")
    seed = int(lab.asked.options.get("seed") or 0)
    images = min(PICTURES, int(lab.asked.options["images"]))
    synthesis = Synthesis(images, "psaq", lab.asked.synthesis_steps, min(32, images), seed)
    folder = lab.work / FOLDER / f"{seed} {images} {synthesis.steps}"
    about = make_folder(loaded, lab.weights, how, synthesis, folder, lab.progress())
    samples = read_made(folder, loaded.source, how)
    made = lab.on(f"zero-shot {seed} {images} {synthesis.steps}", samples)
    rows: list[Row] = []
    for bits in given:
        changes: dict[str, Any] = {"act_bits": INPUT_BITS, "images": images, "fit_images": images}
        at = f"{bits:g}/{INPUT_BITS}"
        rows += measured(made, [(method, bits, at) for method in methods], changes)
    pictures = {"images": images, "steps": about["settings"]["steps"]}
    return {"rows": [float_row(lab), *rows], "pictures": pictures}


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Methods in rows, models in columns."""
    made = found[0]["result"]["pictures"]
    notes = (
        f"Calibrated on {made['images']} pictures by the recipe `psaq` with {made['steps']} steps; "
        "published, 32 pictures and 1,000 steps. Real images are used for the score only.",
        "The inputs of mixed plans keep the distance of 8 bits from the mean width of the weights.",
    )
    caption = "Zero-shot quantization accuracy."
    return (score_table("zero-shot", caption, found, ZERO_SHOT, notes=notes),)


PART = Part(
    name="zero-shot",
    place="Table 5",
    title="accuracy of models quantized without images",
    models=("DeiT-T", "DeiT-S", "Swin-T", "Swin-S"),
    compute=compute,
    tables=tables,
    draw=partial(draw_scores, published=ZERO_SHOT),
    size=(7.6, 2.2),
    calibrated=False,
    rows=tuple(method.key for method in METHODS),
    joined=True,
)

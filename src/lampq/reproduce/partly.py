"""Sensitivity of layers in the float model, and in one whose first block is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lampq.reproduce.lab import Lab
from lampq.reproduce.part import Found, Part, width
from lampq.reproduce.pictures import BLUE, RED, legend_above, lines, whole_ticks
from lampq.reproduce.probing import Probing, at, members
from lampq.reproduce.table import Column, Table

ROLES = ("qkv", "fc1")
FIRST_BITS = 2
STYLES = {"float": (BLUE, "o"), "first block at 2 bits": (RED, "^")}


def compute(lab: Lab) -> Found:
    """Drops of accuracy by role, block and model."""
    bits = int(lab.bits(1)[0])
    probing = Probing(lab, lab.trial("uniform", 3).config)
    found = members(probing.graph)
    first = at(found[min(found)]["block"], FIRST_BITS)
    wanted = [(role, block) for role in ROLES for block in found if role in found[block]]
    progress = lab.progress()
    drops: dict[str, dict[str, dict[str, float]]] = {}
    whole: dict[str, float] = {}
    for name, base in zip(STYLES, ({}, first), strict=True):
        whole[name] = probing.accuracy(base, {})
        drops[name] = {role: {} for role in ROLES}
        for role, block in progress.track(wanted, f"layers at {width(bits)}", len(wanted)):
            reached = probing.accuracy(base, at(found[block][role], bits))
            drops[name][role][str(block)] = whole[name] - reached
    return {"bits": bits, "whole": whole, "drops": drops}


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Blocks in rows; the two models beside each other for each role."""
    (one,) = found
    result = one["result"]
    blocks = list(dict.fromkeys(b for role in ROLES for b in result["drops"]["float"][role]))
    columns = (Column("block"), *(Column(name, role) for role in ROLES for name in STYLES))
    rows = tuple(
        (block, *(result["drops"][name][role].get(block) for role in ROLES for name in STYLES))
        for block in blocks
    )
    whole = result["whole"]
    notes = (
        f"With no layer at {width(result['bits'])} the float model has {whole['float']:.2f} %, "
        f"that with its first block at {FIRST_BITS} bits {whole['first block at 2 bits']:.2f} %. "
        "Attention products stay in float in both.",
    )
    caption = f"Drop of top-1 accuracy in points with one layer at {width(result['bits'])}."
    return (Table("partly-quantized", caption, columns, rows, (), notes),)


def draw(figure: Any, found: Sequence[Found]) -> None:
    """A panel for each role, a line for each model."""
    result = found[0]["result"]
    panels = figure.subplots(1, len(ROLES), sharey=True)
    for panel, role in zip(panels, ROLES, strict=True):
        blocks = [int(block) for block in result["drops"]["float"][role]]
        series = {name: list(result["drops"][name][role].values()) for name in STYLES}
        lines(panel, blocks, series, STYLES)
        panel.set_xlabel(f"block of the {role} layer at {width(result['bits'])}")
        whole_ticks(panel.xaxis)
        legend_above(panel, 2)
    panels[0].set_ylabel("drop of top-1 [points]")


PART = Part(
    name="partly-quantized",
    place="Figure 6",
    title="sensitivity in the float and in a partly quantized model",
    models=("DeiT-S",),
    compute=compute,
    tables=tables,
    draw=draw,
    size=(7.6, 3.0),
)

"""Accuracy with one block, module or layer at one bit, and all else in float."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lampq.reproduce.lab import Lab
from lampq.reproduce.part import Found, Part, base_of, width
from lampq.reproduce.pictures import (
    BLACK,
    MODULE_STYLE,
    ROLE_STYLE,
    legend_above,
    lines,
    whole_ticks,
)
from lampq.reproduce.probing import ROLES, Probing, at, members
from lampq.reproduce.table import Column, Table

COMPONENTS = ("block", "MSA", "MLP", *ROLES)


def compute(lab: Lab) -> Found:
    """Accuracies by block and component."""
    bits = int(lab.bits(1)[0])
    probing = Probing(lab, lab.trial("uniform", 3).config)
    found = members(probing.graph)
    cases = [(block, name) for block in found for name in COMPONENTS if name in found[block]]
    probing.fits.prefetch(at(probing.graph.allocatable, bits).items())
    progress = lab.progress()
    accuracy: dict[str, dict[str, float]] = {str(block): {} for block in found}
    whole = probing.accuracy({}, {})
    for block, name in progress.track(cases, f"components at {width(bits)}", len(cases)):
        accuracy[str(block)][name] = probing.accuracy({}, at(found[block][name], bits))
    return {"bits": bits, "float": whole, "accuracy": accuracy}


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Blocks in rows, components in columns."""
    (one,) = found
    result = one["result"]
    columns = (
        Column("block"),
        Column("all four layers"),
        *(Column(name, "module") for name in COMPONENTS[1:3]),
        *(Column(name, "layer") for name in ROLES),
    )
    rows = tuple(
        (block, *(values.get(name) for name in COMPONENTS))
        for block, values in result["accuracy"].items()
    )
    notes = (
        f"The float model has {result['float']:.2f} % on these images. The component is at "
        f"{width(result['bits'])} for weights and inputs, fitted by `{base_of(one)}`; all else is "
        "in float, the attention products too.",
    )
    caption = f"Top-1 accuracy in percent with one component at {width(result['bits'])}."
    return (Table("sensitivity", caption, columns, rows, (), notes),)


def draw(figure: Any, found: Sequence[Found]) -> None:
    """Lines over the blocks: of blocks and modules, and of layers."""
    result = found[0]["result"]
    blocks = [int(block) for block in result["accuracy"]]
    left, right = figure.subplots(1, 2, sharey=True)
    for panel, names, styles in (
        (left, COMPONENTS[:3], MODULE_STYLE),
        (right, ROLES, ROLE_STYLE),
    ):
        series = {
            name: [values.get(name) for values in result["accuracy"].values()] for name in names
        }
        panel.axhline(result["float"], color=BLACK, linewidth=1, linestyle="--", label="float")
        lines(panel, blocks, series, styles)
        panel.set_xlabel("block")
        whole_ticks(panel.xaxis)
        legend_above(panel, 5)
    left.set_ylabel(f"top-1 [%], one component at {width(result['bits'])}")
    left.set_ylim(bottom=0)


PART = Part(
    name="sensitivity",
    place="Figures 1 and 8",
    title="accuracy with one block, module or layer at 1 bit",
    models=("DeiT-S", "ViT-S", "Swin-S"),
    compute=compute,
    tables=tables,
    draw=draw,
    size=(7.6, 3.2),
)

"""The widths that VT-PTQ and LampQ give to every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lampq.reproduce.lab import Lab
from lampq.reproduce.part import Found, Part
from lampq.reproduce.pictures import BLACK
from lampq.reproduce.probing import ROLES, members
from lampq.reproduce.table import Column, Table

METHODS = {"VT-PTQ": "vtptq", "LampQ": "lampq"}


def compute(lab: Lab) -> Found:
    """Weight widths by method, block and role."""
    bits = lab.bits(3)[0]
    trials = {name: lab.trial(plan, bits) for name, plan in METHODS.items()}
    rows = lab.run(trials)
    blocks = members(lab.fits(trials["LampQ"].config).graph)
    widths = {
        name: {
            str(block): {
                role: row["plan"][parts[role][0].name][0] for role in ROLES if role in parts
            }
            for block, parts in blocks.items()
        }
        for name, row in rows.items()
        if "plan" in row
    }
    means = {name: rows[name]["mean_weight_bits"] for name in widths}
    notices = [f"{name}: {said}" for name in widths for said in rows[name]["notices"]]
    return {"bits": bits, "widths": widths, "means": means, "notices": notices}


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Blocks in rows, the roles of both methods in columns; the last row has means over blocks."""
    (one,) = found
    result = one["result"]
    methods = list(result["widths"])
    blocks = list(result["widths"][methods[0]])
    columns = (
        Column("block"),
        *(Column(role, name, ".3g") for name in methods for role in ROLES),
    )
    cases = [(name, role) for name in methods for role in ROLES]
    rows = [
        (block, *(result["widths"][name][block].get(role) for name, role in cases))
        for block in blocks
    ]
    means = []
    for name, role in cases:
        own = [values[role] for values in result["widths"][name].values() if role in values]
        means.append(sum(own) / len(own) if own else None)
    weighted = ", ".join(f"{name} {value:.4g}" for name, value in result["means"].items())
    notes = (
        f"Mean over all weights: {weighted} bits, at most {result['bits']:g}.",
        *(f"{notice}." for notice in result["notices"]),
    )
    caption = f"Bit allocation at {result['bits']:g} bits."
    body = (*rows, ("mean", *means))
    return (Table("allocation", caption, columns, body, (len(rows),), notes),)


def draw(figure: Any, found: Sequence[Found]) -> None:
    """A map of blocks and roles for each method, with the widths in its fields."""
    result = found[0]["result"]
    methods = list(result["widths"])
    panels = figure.subplots(len(methods), 1, squeeze=False, sharex=True)[:, 0]
    every = [w for name in methods for row in result["widths"][name].values() for w in row.values()]
    low, high = min(every), max(max(every), min(every) + 1)
    for panel, name in zip(panels, methods, strict=True):
        rows = result["widths"][name]
        grid = [[rows[block].get(role, float("nan")) for block in rows] for role in ROLES]
        shades = panel.imshow(grid, cmap="cividis", vmin=low, vmax=high, aspect="auto")
        for y, line in enumerate(grid):
            for x, width in enumerate(line):
                if width == width:  # a role that the block does not have is not a number
                    dark = width <= (low + high) / 2
                    panel.text(
                        x,
                        y,
                        f"{width:g}",
                        ha="center",
                        va="center",
                        color="white" if dark else BLACK,
                        fontweight="bold",
                    )
        panel.set_yticks(range(len(ROLES)), ROLES)
        panel.set_xticks(range(len(rows)), list(rows))
        panel.set_xticks([x + 0.5 for x in range(len(rows) - 1)], minor=True)
        panel.set_yticks([y + 0.5 for y in range(len(ROLES) - 1)], minor=True)
        panel.set_axisbelow(False)
        panel.grid(visible=False)
        panel.grid(which="minor", color="white", linewidth=1.5)
        panel.tick_params(which="both", length=0)
        panel.set_title(f"{name}: mean {result['means'][name]:.3g} bits", loc="left")
    panels[-1].set_xlabel("block")
    bar = figure.colorbar(shades, ax=list(panels), ticks=range(low, high + 1), shrink=0.8)
    bar.set_label("bits")


PART = Part(
    name="allocation",
    place="Figure 7",
    title="widths of all layers by VT-PTQ and by LampQ",
    models=("DeiT-S",),
    compute=compute,
    tables=tables,
    draw=draw,
    size=(6.4, 3.6),
    scored=False,
)

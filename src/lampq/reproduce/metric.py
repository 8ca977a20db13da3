"""The scale of VT-PTQ's metric and of LampQ's, by type of component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lampq.reproduce.lab import Lab
from lampq.reproduce.part import Found, Part, width
from lampq.reproduce.pictures import MODULE_STYLE, ROLE_STYLE, legend_above, lines, whole_ticks
from lampq.reproduce.probing import MODULES, ROLES, members
from lampq.reproduce.table import Column, Table

NUCLEAR, TRACE, SCALED = "VT-PTQ: nuclear norm", "Fisher trace", "LampQ: scaled trace"
# at the two bits of the presets single layers hardly hurt a small model: no harm, no factors
PROBE_BITS = 1
KINDS = {NUCLEAR: tuple(MODULES), TRACE: ROLES, SCALED: ROLES}


def compute(lab: Lab) -> Found:
    """Nuclear norms by module; Fisher traces before and after scaling by layer."""
    bits = lab.bits(3)[0]
    trials = {
        "VT-PTQ": lab.trial("vtptq", bits),
        "LampQ": lab.trial("fisher", bits, {"beta": lab.asked.options.get("beta", PROBE_BITS)}),
    }
    rows = lab.run(trials)
    norms = rows["VT-PTQ"]["details"]["nuclear_norm"]
    fisher = rows["LampQ"]["details"]
    blocks = members(lab.fits(trials["LampQ"].config).graph)
    values: dict[str, dict[str, dict[str, float]]] = {}
    for block, parts in blocks.items():
        layers = {role: parts[role][0].name for role in ROLES if role in parts}
        traces = {role: fisher["fisher_trace"][name] for role, name in layers.items()}
        values[str(block)] = {
            NUCLEAR: {name: norms[parts[name][0].name] for name in MODULES if name in parts},
            TRACE: traces,
            SCALED: {role: fisher["role_scale"][role] * value for role, value in traces.items()},
        }
    return {
        "values": values,
        "role_scale": fisher["role_scale"],
        "probe": {name: fisher["probe"][name] for name in ("bits", "signal", "blocks")},
        "spread": _spread(values),
        "notices": rows["LampQ"]["notices"],
    }


def _spread(values: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """For each metric the largest mean of a type over the smallest."""
    found = {}
    for kind, names in KINDS.items():
        means = []
        for name in names:
            own = [block[kind][name] for block in values.values() if name in block[kind]]
            means += [sum(own) / len(own)] if own else []
        found[kind] = max(means) / min(means)
    return found


def tables(found: Sequence[Found]) -> tuple[Table, ...]:
    """Blocks in rows, metrics and types in columns."""
    (one,) = found
    result = one["result"]
    columns = (
        Column("block"),
        *(Column(name, kind, ".3g") for kind, names in KINDS.items() for name in names),
    )
    rows = tuple(
        (block, *(value[kind].get(name) for kind, names in KINDS.items() for name in names))
        for block, value in result["values"].items()
    )
    spread, scale = result["spread"], result["role_scale"]
    factors = ", ".join(f"{role} {scale[role]:.3g}" for role in ROLES if role in scale)
    notes = (
        f"Largest mean of a type over the smallest: nuclear norms {spread[NUCLEAR]:.3g}, traces "
        f"{spread[TRACE]:.3g}, scaled {spread[SCALED]:.3g}.",
        f"Factors alpha of the types, from probes at {width(result['probe']['bits'])}: {factors}.",
        *(f"LampQ: {notice}." for notice in result["notices"]),
    )
    caption = "Metric values by block and type."
    return (Table("metric", caption, columns, rows, (), notes),)


def draw(figure: Any, found: Sequence[Found]) -> None:
    """A panel for each metric, on logarithmic axes."""
    values = found[0]["result"]["values"]
    blocks = [int(block) for block in values]
    panels = figure.subplots(1, len(KINDS))
    for panel, (kind, names) in zip(panels, KINDS.items(), strict=True):
        series = {name: [block[kind].get(name) for block in values.values()] for name in names}
        styles = MODULE_STYLE if kind == NUCLEAR else ROLE_STYLE
        lines(panel, blocks, series, styles)
        panel.set_yscale("log")
        panel.set_ylabel(kind)
        panel.set_xlabel("block")
        whole_ticks(panel.xaxis)
        legend_above(panel, 4)


PART = Part(
    name="metric",
    place="Figure 5",
    title="scale of the metrics of VT-PTQ and LampQ by type",
    models=("DeiT-S",),
    compute=compute,
    tables=tables,
    draw=draw,
    size=(9.4, 2.9),
    scored=False,
)

"""The tables and figures of the paper, each on any model (Kim et al., AAAI 2026).

A part is one file with one ``Part``; one line below registers it.
"""

from __future__ import annotations

from lampq.errors import ConfigError
from lampq.reproduce import (
    ablation,
    allocation,
    classification,
    detection,
    errors,
    hyperparameters,
    metric,
    partly,
    runtime,
    sensitivity,
    zero_shot,
)
from lampq.reproduce.part import Part

ALL = "all"
PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        errors.PART,
        classification.PART,
        detection.PART,
        ablation.PART,
        metric.PART,
        allocation.PART,
        hyperparameters.PART,
        sensitivity.PART,
        partly.PART,
        zero_shot.PART,
        runtime.PART,
    )
}


def named(name: str | None) -> tuple[Part, ...]:
    """The part of that name, or all of them."""
    if name in (None, ALL):
        return tuple(PARTS.values())
    if name not in PARTS:
        known = ", ".join((*PARTS, ALL))
        raise ConfigError(f"unknown table or figure {name!r}; known: {known}")
    return (PARTS[name],)

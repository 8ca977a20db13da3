"""A table or figure of the paper: how it is computed, laid out and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lampq.reproduce.lab import Lab
from lampq.reproduce.table import Table

# what one part found on one model: the content of its JSON file
Found = dict[str, Any]


def base_of(found: Found) -> str:
    """The base method of what was found."""
    return str(found["asked"]["options"].get("method") or "adalog")


def width(bits: int) -> str:
    """A width in words."""
    return "1 bit" if bits == 1 else f"{bits} bits"


def told_once(notices: Iterable[tuple[str, str]]) -> list[str]:
    """Each notice once, with the names of all that have it before it."""
    names: dict[str, list[str]] = {}
    for name, notice in notices:
        names.setdefault(notice, []).append(name)
    return [f"{', '.join(some)}: {notice}." for notice, some in names.items()]


@dataclass(frozen=True, slots=True)
class Part:
    """One table or figure of the paper.

    Attributes:
        name: Its name on the command line and the stem of its files.
        place: Where the paper has it.
        title: What it shows, in a few words.
        models: The models that the paper has it for, by the paper's names.
        compute: All the long work on one model; gives what can be written as JSON.
        tables: The tables of what was found; of several models only if ``joined``.
        draw: Draws the same into an empty figure of matplotlib.
        size: Width and height of that figure in inches, for one model.
        rows: The methods that can be asked for one by one.
        scored: Whether it needs evaluation images.
        calibrated: Whether it needs calibration images.
        joined: Whether several models make one table.
        images: What the paper's own rows are measured on.
        task: What its models are for.
    """

    name: str
    place: str
    title: str
    models: tuple[str, ...]
    compute: Callable[[Lab], Found]
    tables: Callable[[Sequence[Found]], tuple[Table, ...]]
    draw: Callable[[Any, Sequence[Found]], None]
    size: tuple[float, float]
    rows: tuple[str, ...] = ()
    scored: bool = True
    calibrated: bool = True
    joined: bool = False
    images: str = "ImageNet (ILSVRC 2012)"
    task: str = "classification"

"""What a metric may look at, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from lampq.data import Samples
from lampq.methods.base import FitCache
from lampq.progress import Journal, Progress
from lampq.types import CostTable, LayerBits, ModelGraph


@dataclass(frozen=True, slots=True)
class Evidence:
    """The float model in explicit form, its graph, its fits, and the calibration samples."""

    model: nn.Module
    graph: ModelGraph
    fits: FitCache
    samples: Samples
    seed: int = 0
    progress: Progress = field(default_factory=Progress)
    journal: Journal = field(default_factory=Journal)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A cost table with what led to it, by name, ready for a report."""

    table: CostTable
    details: Mapping[str, Any]


class Metric(Protocol):
    """How much each width of each layer would hurt."""

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        """Costs of all layers at all widths."""
        ...

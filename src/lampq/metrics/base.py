"""What a metric may look at, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from lampq.data import AnySamples
from lampq.methods.base import FitCache
from lampq.progress import Journal, Progress
from lampq.task import CLASSIFICATION, Task
from lampq.types import CostTable, LayerBits, ModelGraph


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a metric may look at; nothing of it may be changed.

    Attributes:
        model: The float model in explicit form.
        graph: Its sites; ``graph.allocatable`` are the searched layers.
        fits: Any layer at any width, computed at most once.
        samples: The calibration images.
        seed: The seed of every draw.
        progress: Loops go through ``progress.track``.
        journal: Long work goes through ``journal.once``, and through ``journal.of_model.once``
            where it looks at no fit.
        task: How the model is run, what it loses and how good its answers are.
    """

    model: nn.Module
    graph: ModelGraph
    fits: FitCache
    samples: AnySamples
    seed: int = 0
    progress: Progress = field(default_factory=Progress)
    journal: Journal = field(default_factory=Journal)
    task: Task = CLASSIFICATION


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A cost table with what led to it, by name, ready for a report.

    Attributes:
        table: The cost of every searched layer at every choice.
        details: Whatever explains it; must be ready for JSON.
    """

    table: CostTable
    details: Mapping[str, Any]


class Metric(Protocol):
    """How much each width of each layer would hurt."""

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        """Costs of all layers at all widths."""
        ...

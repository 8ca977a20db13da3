"""How much a width would hurt."""

from lampq.metrics.base import Evidence, Metric, Sensitivity
from lampq.metrics.fisher import TypeAwareFisher
from lampq.metrics.output import MeasuredKL, OutputFisher, ReconstructionError
from lampq.registry import Registry

METRICS: Registry[Metric] = Registry("metric", "lampq.metrics")
METRICS.add("fisher", TypeAwareFisher)
METRICS.add("output", OutputFisher)
METRICS.add("kl", MeasuredKL)
METRICS.add("recon", ReconstructionError)

__all__ = ["METRICS", "Evidence", "Metric", "Sensitivity"]

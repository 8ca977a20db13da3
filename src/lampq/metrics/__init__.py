"""How much a width would hurt."""

from functools import partial

from lampq.metrics.base import Evidence, Metric, Sensitivity
from lampq.metrics.fisher import TypeAwareFisher
from lampq.metrics.hawq import Hawq
from lampq.metrics.nuclear import NuclearNorm
from lampq.metrics.output import MeasuredHarm, OutputFisher, ReconstructionError
from lampq.registry import Registry

METRICS: Registry[Metric] = Registry("metric", "lampq.metrics")
METRICS.add("fisher", TypeAwareFisher)
METRICS.add("output", OutputFisher)
METRICS.add("kl", MeasuredHarm)
METRICS.add("loss", partial(MeasuredHarm, signal="loss"))
METRICS.add("recon", ReconstructionError)
METRICS.add("hawq", Hawq)
METRICS.add("nuclear", NuclearNorm)

__all__ = ["METRICS", "Evidence", "Metric", "Sensitivity"]

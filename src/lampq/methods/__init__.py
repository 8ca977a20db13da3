"""How one layer is quantized at one width."""

from lampq.methods.adalog import AdaLog
from lampq.methods.base import FitCache, FitStore, LinearView, Method, SiteWidths
from lampq.methods.minmax import MinMax
from lampq.methods.repq import RepQ
from lampq.registry import Registry

METHODS: Registry[Method] = Registry("method", "lampq.methods")
METHODS.add("adalog", AdaLog)
METHODS.add("minmax", MinMax)
METHODS.add("repq", RepQ)

__all__ = ["METHODS", "FitCache", "FitStore", "LinearView", "Method", "SiteWidths"]

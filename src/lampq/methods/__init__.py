"""How one layer is quantized at one width."""

from lampq.methods.adalog import AdaLog
from lampq.methods.apq import APQ
from lampq.methods.base import FitCache, FitStore, LinearView, Method, SiteWidths
from lampq.methods.erq import ERQ
from lampq.methods.gptq import GPTQ
from lampq.methods.minmax import MinMax
from lampq.methods.mse import MSE
from lampq.methods.psaq import psaq
from lampq.methods.ptq4vit import PTQ4ViT
from lampq.methods.repq import RepQ
from lampq.registry import Registry

METHODS: Registry[Method] = Registry("method", "lampq.methods")
METHODS.add("adalog", AdaLog)
METHODS.add("apq", APQ)
METHODS.add("erq", ERQ)
METHODS.add("gptq", GPTQ)
METHODS.add("minmax", MinMax)
METHODS.add("mse", MSE)
METHODS.add("psaq", psaq)
METHODS.add("ptq4vit", PTQ4ViT)
METHODS.add("repq", RepQ)

__all__ = ["METHODS", "FitCache", "FitStore", "LinearView", "Method", "SiteWidths"]

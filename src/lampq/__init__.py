"""lampq: layer-wise mixed-precision post-training quantization for Vision Transformers."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lampq.config import RunConfig, make_config
from lampq.data import Preprocessing, Samples
from lampq.errors import LampqError
from lampq.graph.families import RolePattern
from lampq.pipeline import Result, quantize
from lampq.types import BitPlan, Budget, LayerBits, LayerRole
from lampq.version import __version__
from lampq.zero_shot import synthesize


def load(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The quantized model of a packed checkpoint, ready to run.

    ``model`` is the float architecture, needed only for classes that timm does not know.
    """
    from lampq.artifact.checkpoint import load_checkpoint

    return load_checkpoint(Path(path), model)


__all__ = [
    "BitPlan",
    "Budget",
    "LampqError",
    "LayerBits",
    "LayerRole",
    "Preprocessing",
    "Result",
    "RolePattern",
    "RunConfig",
    "Samples",
    "__version__",
    "load",
    "make_config",
    "quantize",
    "synthesize",
]

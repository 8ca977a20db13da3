"""lampq: layer-wise mixed-precision post-training quantization for Vision Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from torch import nn

if TYPE_CHECKING:
    from lampq.export import Export
    from lampq.runtime import Deployed

from lampq.config import RunConfig, make_config
from lampq.data import Preprocessing, Samples
from lampq.errors import LampqError
from lampq.graph.families import RolePattern
from lampq.pipeline import Result, quantize
from lampq.types import BitPlan, Budget, LayerBits, LayerRole
from lampq.version import __version__
from lampq.zero_shot import synthesize


@overload
def load(path: str | Path, model: nn.Module | None = None) -> nn.Module: ...
@overload
def load(
    path: str | Path, model: nn.Module | None = None, *, runtime: Literal["torch"]
) -> nn.Module: ...
@overload
def load(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    runtime: str,
    threads: int | None = None,
) -> Deployed: ...
def load(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    runtime: str = "torch",
    threads: int | None = None,
) -> Deployed:
    """The quantized model of a packed checkpoint, ready to run: images in, logits out.

    Args:
        path: A packed checkpoint, or an exported ONNX file.
        model: The float architecture, needed only for classes that timm does not know.
        runtime: "torch", "onnxruntime" or "openvino"; for the last two the graph of a checkpoint
            is built in memory.
        threads: How many threads these two use.

    Returns:
        A module in torch, a ``Session`` in the other runtimes.
    """
    from lampq.runtime import load as load_deployed

    return load_deployed(Path(path), runtime, model, threads=threads)


def export_onnx(
    checkpoint: str | Path,
    out: str | Path,
    samples: Samples,
    *,
    model: nn.Module | None = None,
    runtimes: tuple[str, ...] = (),
    any_cpu: bool = True,
) -> Export:
    """Write a packed checkpoint as a standard ONNX file, verified on the samples.

    Args:
        checkpoint: The file of ``Result.save``, or of a run.
        out: The ONNX file to write.
        samples: Images on which the answers are compared.
        model: The float architecture, needed only for classes that timm does not know.
        runtimes: Where to verify; all that are installed by default.
        any_cpu: Right also on x86 processors without 8-bit dot products.

    Raises:
        ExportError: Where the verification fails; nothing is written then.
    """
    from lampq.export import export_onnx as export

    return export(checkpoint, out, samples, model=model, runtimes=runtimes, any_cpu=any_cpu)


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
    "export_onnx",
    "load",
    "make_config",
    "quantize",
    "synthesize",
]

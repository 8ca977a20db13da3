"""A quantized model as a standard ONNX graph of QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from typing import Any

from torch import nn

from lampq.artifact.onnx.builder import GraphBuilder
from lampq.artifact.onnx.families import emit_model
from lampq.artifact.onnx.parts import INPUT, OUTPUT
from lampq.artifact.onnx.pyramid import check_pyramid, emit_pyramid
from lampq.errors import ExportError
from lampq.quant.modules import QuantLayer, QuantMatMul, QuantSum


def onnx_model(model: nn.Module, *, any_cpu: bool = True) -> Any:
    """The ONNX model (a ModelProto) of a model in explicit form, quantized or not.

    ``any_cpu``: layers of eight-bit inputs and weights are split in two where one product could
    overflow on x86 processors without 8-bit dot products.
    """
    g = GraphBuilder(any_cpu=any_cpu)
    emit_model(g, model)
    return _complete(g, model)


def onnx_pyramid(model: nn.Module, size: tuple[int, int], *, any_cpu: bool = True) -> Any:
    """The ONNX model of a detector's backbone and pyramid, for images of that height and width."""
    check_pyramid(model, size)
    g = GraphBuilder(any_cpu=any_cpu)
    emit_pyramid(g, model, size)
    return _complete(g, model)


def _complete(g: GraphBuilder, model: nn.Module) -> Any:
    """The finished graph; raises if a quantized site has no place in it."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLayer | QuantMatMul | QuantSum) and name not in g.placed:
            raise ExportError(f"the model cannot be exported: {name!r} has no place in the graph")
    return g.model()


__all__ = ["INPUT", "OUTPUT", "GraphBuilder", "onnx_model", "onnx_pyramid"]

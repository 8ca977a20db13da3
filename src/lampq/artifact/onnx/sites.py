"""Quantized and float layers, products and sums as ONNX nodes.

A layer of at most eight bits whose input has one uniform scale becomes QuantizeLinear,
DequantizeLinear and a MatMul of an int8 weight: the form that runtimes run on integer kernels. All
else is float operators that give the values of the torch module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from lampq.artifact.onnx.builder import GraphBuilder
from lampq.artifact.onnx.folded import fold, foldable
from lampq.artifact.onnx.grids import array, cut, quantized, quantizer
from lampq.errors import ExportError
from lampq.graph.attention import MatMul
from lampq.graph.blocks import Sum
from lampq.quant.base import Quantizer
from lampq.quant.modules import QuantConv2d, QuantLayer, QuantLinear, QuantMatMul, QuantSum
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import INTEGER_BITS

MOST: int = 2**INTEGER_BITS - 1
# in the names of the nodes of first tokens that have a grid of their own
FIRST = "first_"


def runs_in_integers(layer: QuantLayer) -> bool:
    """Whether a layer is exported for integer kernels.

    Its weight is on uniform grids, its input on one, or on two if first tokens have their own, and
    none of them has more than eight bits.
    """
    inputs = layer.input_quantizer
    parts = (inputs.prefix, inputs.body) if isinstance(inputs, PrefixQuantizer) else (inputs,)
    return all(map(_one_grid, parts)) and foldable(layer)


def _one_grid(grid: Quantizer | None) -> bool:
    return (
        isinstance(grid, UniformQuantizer)
        and grid.bits <= INTEGER_BITS
        and grid.scale.numel() == 1
        and grid.zero.numel() == 1
    )


def product_nodes(model: nn.Module) -> dict[str, str]:
    """The names of all integer products of a model's graph, and the layer of each."""
    return {
        f"{name}/{tokens}product{suffix}": name
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLayer) and runs_in_integers(layer)
        for suffix in ("", "_low", "_sum")
        for tokens in ("", FIRST)
    }


def tokens_layer(g: GraphBuilder, layer: QuantLayer, name: str, x: str) -> str:
    """A layer on tokens (..., channels)."""
    g.placed.add(name)
    inputs = layer.input_quantizer
    if runs_in_integers(layer) and isinstance(inputs, PrefixQuantizer):
        first, others = cut(g, inputs, name, x)
        parts = [
            _integer_layer(g, layer, name, others, _ByteGrid.of(inputs.body)),
            _integer_layer(g, layer, name, first, _ByteGrid.of(inputs.prefix), FIRST),
        ]
        output = g.node("Concat", *reversed(parts), name=f"{name}/tokens", axis=-2)
    elif runs_in_integers(layer):
        output = _integer_layer(g, layer, name, x, _ByteGrid.of(inputs))
    else:
        x = quantized(g, layer.input_quantizer, f"{name}/input", x)
        output = _float_product(g, name, x, layer.weight.flatten(1), layer.bias)
    return quantized(g, layer.output_quantizer, f"{name}/quantized", output)


def _integer_layer(
    g: GraphBuilder, layer: QuantLayer, name: str, x: str, grid: _ByteGrid, tokens: str = ""
) -> str:
    """The layer on tokens of one grid; ``tokens`` is in the names of their nodes."""
    codes = _codes(g, grid, f"{name}/{tokens}", x)
    return _integer_product(g, layer, name, codes, grid, tokens)


def _float_product(g: GraphBuilder, name: str, x: str, weight: Tensor, bias: Tensor | None) -> str:
    matrix = g.constant(f"{name}.weight", array(weight).T)
    product = g.node("MatMul", x, matrix, name=f"{name}/product")
    if bias is None:
        return product
    return g.node("Add", product, g.constant(f"{name}.bias", array(bias)), name=f"{name}/output")


@dataclass(frozen=True, slots=True)
class _ByteGrid:
    """An input grid of at most eight bits on bytes.

    ``zero`` is the byte nearest to the zero point. What decodes with it is too large by ``moved``.
    """

    scale: float
    point: float
    top: int

    @classmethod
    def of(cls, grid: Quantizer | None) -> _ByteGrid:
        assert isinstance(grid, UniformQuantizer), "checked by runs_in_integers"
        return cls(float(grid.scale), float(grid.zero), 2**grid.bits - 1)

    @property
    def zero(self) -> int:
        return min(max(round(self.point), 0), MOST)

    @property
    def moved(self) -> float:
        return (self.point - self.zero) * self.scale


def _codes(g: GraphBuilder, grid: _ByteGrid, place: str, x: str) -> str:
    """Codes of inputs in the fewest steps; names of nodes start with ``place``.

    QuantizeLinear rounds before it adds the zero point, and torch after it: an input just on the
    border between two codes may take the other one.
    """
    if grid.moved:
        x = g.node("Add", x, g.number(grid.moved), name=f"{place}moved")
    if grid.top < MOST:
        low, high = (g.number((code - grid.zero) * grid.scale) for code in (0, grid.top))
        x = g.node("Clip", x, low, high, name=f"{place}clip")
    step, point = g.number(grid.scale), g.shared(np.uint8(grid.zero))
    return g.node("QuantizeLinear", x, step, point, name=f"{place}codes")


def _torch_codes(g: GraphBuilder, grid: _ByteGrid, name: str, x: str) -> str:
    """Codes of inputs in the steps of torch, the same also on the border between two.

    Pixels are whole numbers before they are normalised, so that many may be just there.
    """
    x = g.node("Div", x, g.number(grid.scale), name=f"{name}/ratio")
    x = g.node("Add", x, g.number(grid.point), name=f"{name}/moved")
    if grid.top < MOST:
        x = g.node("Clip", x, g.number(0), g.number(grid.top), name=f"{name}/clip")
    one, none = g.number(1), g.shared(np.uint8(0))
    return g.node("QuantizeLinear", x, one, none, name=f"{name}/codes")


def _integer_product(
    g: GraphBuilder, layer: QuantLayer, name: str, codes: str, grid: _ByteGrid, tokens: str = ""
) -> str:
    """The layer on the codes of its inputs."""
    place = f"{name}/{tokens}"
    step, point = g.number(grid.scale), g.shared(np.uint8(grid.zero))
    decoded = g.node("DequantizeLinear", codes, step, point, name=f"{place}input")
    folded = fold(layer)
    rows = g.tensor(f"{name}.scale", folded.scale)
    output = ""
    for part, suffix in zip(folded.parts(grid.top, any_cpu=g.any_cpu), ("", "_low"), strict=False):
        matrix = g.tensor(f"{name}.weight{suffix}", part.T)
        weight = g.node("DequantizeLinear", matrix, rows, name=f"{place}weight{suffix}", axis=1)
        product = g.node("MatMul", decoded, weight, name=f"{place}product{suffix}")
        output = g.node("Add", output, product, name=f"{place}whole") if output else product
    if folded.centre is not None:
        ones = g.shared(np.ones((folded.values.shape[1], 1), dtype=np.int8))
        unit = g.shared(np.ones(1, np.float32))
        weight = g.node("DequantizeLinear", ones, unit, name=f"{place}ones", axis=1)
        total = g.node("MatMul", decoded, weight, name=f"{place}product_sum")
        centre = g.tensor(f"{name}.centre", folded.centre)
        share = g.node("Mul", total, centre, name=f"{place}centre")
        output = g.node("Add", output, share, name=f"{place}centred")
    sums = layer.weight.flatten(1).double().sum(dim=1)
    bias = g.tensor(f"{name}.bias", array(layer.bias.double() - grid.moved * sums))
    return g.node("Add", output, bias, name=f"{place}output")


def linear(g: GraphBuilder, layer: nn.Module, name: str, x: str) -> str:
    """A linear layer, quantized or not, on tokens (..., channels)."""
    if isinstance(layer, QuantLinear):
        return tokens_layer(g, layer, name, x)
    if isinstance(layer, nn.Linear):
        return _float_product(g, name, x, layer.weight, layer.bias)
    raise ExportError(f"{name!r} is a {type(layer).__name__}, and export knows linear layers there")


def patches(
    g: GraphBuilder,
    layer: nn.Module,
    name: str,
    x: str,
    size: tuple[int, int, int],
) -> tuple[str, tuple[int, int]]:
    """The patch embedding of images of a size (channels, height, width): tokens and their grid."""
    if not isinstance(layer, QuantConv2d | nn.Conv2d):
        raise ExportError(f"{name!r} is a {type(layer).__name__}, and export knows convolutions")
    channels, height, width = size
    rows, columns = (int(step) for step in layer.stride)
    plain = tuple(layer.dilation) == (1, 1) and height % rows == 0 and width % columns == 0
    if not plain or tuple(layer.weight.shape[2:]) != (rows, columns):
        raise ExportError(
            f"export needs images of whole patches, and {name!r} takes patches of "
            f"{tuple(layer.weight.shape[2:])} every {rows} and {columns} pixels of "
            f"{height} x {width}"
        )
    grid = (height // rows, width // columns)
    if isinstance(layer, QuantConv2d) and runs_in_integers(layer):
        shape = g.whole(0, channels, grid[0], rows, grid[1], columns)
        split = g.node("Reshape", x, shape, name=f"{name}/split")
        turned = g.node("Transpose", split, name=f"{name}/turned", perm=[0, 2, 4, 1, 3, 5])
        flat = g.whole(0, grid[0] * grid[1], channels * rows * columns)
        tokens = g.node("Reshape", turned, flat, name=f"{name}/patches")
        g.placed.add(name)
        byte_grid = _ByteGrid.of(layer.input_quantizer)
        codes = _torch_codes(g, byte_grid, name, tokens)
        output = _integer_product(g, layer, name, codes, byte_grid)
        return quantized(g, layer.output_quantizer, f"{name}/quantized", output), grid
    if isinstance(layer, QuantConv2d):
        g.placed.add(name)
        x = quantized(g, layer.input_quantizer, f"{name}/input", x)
    kernel = g.constant(f"{name}.weight", array(layer.weight))
    inputs = [x, kernel]
    if layer.bias is not None:
        inputs.append(g.constant(f"{name}.bias", array(layer.bias)))
    maps = g.node("Conv", *inputs, name=f"{name}/product", strides=[rows, columns])
    flat = g.whole(0, len(layer.weight), grid[0] * grid[1])
    listed = g.node("Reshape", maps, flat, name=f"{name}/listed")
    output = g.node("Transpose", listed, name=f"{name}/output", perm=[0, 2, 1])
    if isinstance(layer, QuantConv2d):
        output = quantized(g, layer.output_quantizer, f"{name}/quantized", output)
    return output, grid


def is_patches(layer: QuantConv2d | nn.Conv2d) -> bool:
    """Whether a convolution takes patches side by side: a product of tokens."""
    sides = tuple(layer.weight.shape[2:])
    return tuple(layer.stride) == sides and tuple(layer.padding) == (0, 0)


def convolution(g: GraphBuilder, layer: nn.Module, name: str, x: str, size: tuple[int, int]) -> str:
    """A convolution of maps (batch, channels, height, width) of that size; others are float.

    One of single pixels is a product of tokens, which may run in integers.
    """
    if not isinstance(layer, QuantConv2d | nn.Conv2d):
        raise ExportError(f"{name!r} is a {type(layer).__name__}, and export knows convolutions")
    if is_patches(layer):
        whole = (int(layer.weight.shape[1]), *size)
        tokens, grid = patches(g, layer, name, x, whole)
        turned = g.node("Transpose", tokens, name=f"{name}/channels", perm=[0, 2, 1])
        return g.node("Reshape", turned, g.whole(0, -1, *grid), name=f"{name}/maps")
    inputs = [x, g.constant(f"{name}.weight", array(layer.weight))]
    if isinstance(layer, QuantConv2d):
        g.placed.add(name)
        inputs[0] = quantized(g, layer.input_quantizer, f"{name}/input", x)
    if layer.bias is not None:
        inputs.append(g.constant(f"{name}.bias", array(layer.bias)))
    down, across = (int(side) for side in layer.padding)
    strides = [int(step) for step in layer.stride]
    pads = [down, across, down, across]
    output = g.node("Conv", *inputs, name=f"{name}/convolved", strides=strides, pads=pads)
    if isinstance(layer, QuantConv2d):
        output = quantized(g, layer.output_quantizer, f"{name}/quantized", output)
    return output


def matmul(g: GraphBuilder, site: nn.Module, name: str, a: str, b: str) -> str:
    """The product of two operands; what of it is quantized is so by float operators."""
    left, right = operand_grids(site, name)
    a, b = quantized(g, left, f"{name}/left", a), quantized(g, right, f"{name}/right", b)
    return product(g, site, name, a, b)


def operand_grids(site: nn.Module, name: str) -> tuple[Quantizer | None, Quantizer | None]:
    """How the operands of a product are quantized, if they are."""
    if isinstance(site, MatMul):
        return None, None
    if not isinstance(site, QuantMatMul):
        raise ExportError(f"{name!r} is a {type(site).__name__}, and export knows products there")
    return site.left, site.right


def product(g: GraphBuilder, site: nn.Module, name: str, a: str, b: str) -> str:
    """The product of two operands that are quantized already."""
    made = g.node("MatMul", a, b, name=f"{name}/product")
    if not isinstance(site, QuantMatMul):
        return made
    g.placed.add(name)
    return quantized(g, site.output, f"{name}/quantized", made)


def total(g: GraphBuilder, site: nn.Module, name: str, a: str, b: str) -> str:
    """The sum of two operands, quantized by float operators or not at all."""
    if isinstance(site, Sum):
        return g.node("Add", a, b, name=f"{name}/total")
    if not isinstance(site, QuantSum):
        raise ExportError(f"{name!r} is a {type(site).__name__}, and export knows sums there")
    g.placed.add(name)
    return quantizer(g, site.quantizer, name, g.node("Add", a, b, name=f"{name}/total"))

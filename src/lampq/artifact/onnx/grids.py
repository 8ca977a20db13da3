"""Quantizers as ONNX nodes: float operators that give the values of the torch module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from lampq.artifact.onnx.builder import GraphBuilder
from lampq.errors import ExportError
from lampq.quant.base import Quantizer
from lampq.quant.log import SMALLEST, LogQuantizer
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import SMALLEST as SMALLEST_STEP
from lampq.quant.token import TokenQuantizer
from lampq.quant.twin import TwinGeluQuantizer, TwinSoftmaxQuantizer
from lampq.quant.uniform import UniformQuantizer


def array(tensor: Tensor) -> Any:
    """The values of a tensor in single precision."""
    return tensor.detach().cpu().float().numpy()


def quantized(g: GraphBuilder, grid: Quantizer | None, name: str, x: str) -> str:
    """A value as the quantizer gives it, or as it is if there is none."""
    return x if grid is None else quantizer(g, grid, name, x)


def quantizer(g: GraphBuilder, grid: Quantizer, name: str, x: str) -> str:
    """A quantizer as float operators: decoded values of encoded ones."""
    emit = _QUANTIZERS.get(type(grid))
    if emit is None:
        raise ExportError(f"{name!r} has a quantizer of kind {grid.kind!r}, unknown to export")
    return emit(g, grid, name, x)


def _uniform(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    scale, low = (g.shared(array(t)) for t in (grid.scale, -grid.zero))
    return _on_grid(g, 2**grid.bits - 1, name, x, scale, low)


def _token(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    top = g.number(2**grid.bits - 1)
    scale, low = _token_grid(g, grid.axis, name, x, top, g.shared(array(grid.clip)))
    return _on_grid(g, 2**grid.bits - 1, name, x, scale, low)


def _token_grid(
    g: GraphBuilder, axis: int, name: str, x: str, top: str, clip: str
) -> tuple[str, str]:
    """Scale of every token, and its least value in steps of the whole range.

    ``top`` is the last code, ``clip`` the part of the range that is taken.
    """
    axes, none = [axis], g.number(0)
    low = g.node("ReduceMin", x, name=f"{name}/least", axes=axes, keepdims=1)
    low = g.node("Min", low, none, name=f"{name}/low")
    high = g.node("ReduceMax", x, name=f"{name}/most", axes=axes, keepdims=1)
    high = g.node("Max", high, none, name=f"{name}/high")
    step = g.node("Sub", high, low, name=f"{name}/range")
    step = g.node("Div", step, top, name=f"{name}/share")
    step = g.node("Max", step, g.number(SMALLEST_STEP), name=f"{name}/step")
    first = g.node("Div", low, step, name=f"{name}/first")
    return g.node("Mul", step, clip, name=f"{name}/scale"), first


def _prefix(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    one_pass = isinstance(grid.prefix, TokenQuantizer) and isinstance(
        grid.body, TokenQuantizer | UniformQuantizer
    )
    if one_pass and g.tokens is not None and grid.count < g.tokens:
        return _prefix_at_once(g, grid, name, x, g.tokens)
    first, others = cut(g, grid, name, x)
    first = quantizer(g, grid.prefix, f"{name}/first", first)
    others = quantizer(g, grid.body, f"{name}/others", others)
    return g.node("Concat", first, others, name=f"{name}/tokens", axis=-3 - grid.axis)


def _prefix_at_once(g: GraphBuilder, grid: Any, name: str, x: str, tokens: int) -> str:
    """All tokens by the same nodes, with constants that differ from token to token.

    Half the nodes of two parts, and none of the tokens is copied.
    """
    prefix, body = grid.prefix, grid.body

    def of_tokens(first: Any, others: Any) -> Any:
        shape = np.broadcast_shapes(np.shape(first), np.shape(others), (1, 1))
        counts = (grid.count, tokens - grid.count)
        parts = [
            np.repeat(np.broadcast_to(value, shape), count, axis=-3 - grid.axis)
            for value, count in zip((first, others), counts, strict=True)
        ]
        return np.concatenate(parts, axis=-3 - grid.axis)

    ranged = isinstance(body, TokenQuantizer)
    last = g.shared(of_tokens(np.float32(2**prefix.bits - 1), np.float32(2**body.bits - 1)))
    clip = g.shared(of_tokens(array(prefix.clip), array(body.clip if ranged else prefix.clip)))
    scale, low = _token_grid(g, grid.axis, name, x, last, clip)
    if not ranged:
        own = g.shared(of_tokens(np.True_, np.False_))
        scale = g.node("Where", own, scale, g.shared(array(body.scale)), name=f"{name}/scales")
        low = g.node("Where", own, low, g.shared(array(-body.zero)), name=f"{name}/lows")
    return _on_grid(g, last, name, x, scale, low)


def cut(g: GraphBuilder, grid: PrefixQuantizer, name: str, x: str) -> tuple[str, str]:
    """The first tokens and the others."""
    along, none, end = g.whole(-3 - grid.axis), g.whole(0), g.whole(np.iinfo(np.int64).max)
    count = g.whole(grid.count)
    return (
        g.node("Slice", x, none, count, along, name=f"{name}/first_tokens"),
        g.node("Slice", x, count, end, along, name=f"{name}/other_tokens"),
    )


def _on_grid(g: GraphBuilder, last: int | str, name: str, x: str, scale: str, low: str) -> str:
    """The value on a grid from ``low``, minus its zero point, on.

    Its last code is one number, or one for every token.
    """
    x = g.node("Div", x, scale, name=f"{name}/ratio")
    x = g.node("Sub", x, low, name=f"{name}/moved")
    x = g.node("Round", x, name=f"{name}/rounded")
    if isinstance(last, int):
        x = g.node("Clip", x, g.number(0), g.number(last), name=f"{name}/codes")
    else:
        x = g.node("Max", x, g.number(0), name=f"{name}/raised")
        x = g.node("Min", x, last, name=f"{name}/codes")
    x = g.node("Add", x, low, name=f"{name}/steps")
    return g.node("Mul", x, scale, name=f"{name}/value")


def _log(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    shift, scale = array(grid.shift), array(grid.scale)
    if shift.any():
        x = g.node("Add", x, g.shared(shift), name=f"{name}/shifted")
    x = g.node("Div", x, g.shared(scale), name=f"{name}/ratio")
    x = g.node("Clip", x, g.number(SMALLEST), g.number(1), name=f"{name}/share")
    x = g.node("Log", x, name=f"{name}/log")
    factor = -grid.denominator / grid.step / math.log(2)
    x = g.node("Mul", x, g.number(factor), name=f"{name}/power")
    x = g.node("Round", x, name=f"{name}/rounded")
    x = g.node("Min", x, g.number(grid.n_codes - 1), name=f"{name}/limited")
    x = g.indices(x, name=f"{name}/codes")
    levels = g.constant(f"{name}.levels", array(grid.levels))
    return g.node("Gather", levels, x, name=f"{name}/value")


def _twin_gelu(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    low, high = (g.shared(array(t)) for t in (grid.low, grid.high))
    nought = g.number(0)
    negative = g.node("Less", x, nought, name=f"{name}/negative")
    step = g.node("Where", negative, low, high, name=f"{name}/step")
    x = g.node("Div", x, step, name=f"{name}/ratio")
    x = g.node("Round", x, name=f"{name}/rounded")
    least, most = g.number(-grid.zero), g.number(grid.n_codes - 1 - grid.zero)
    x = g.node("Clip", x, least, most, name=f"{name}/steps")
    below = g.node("Less", x, nought, name=f"{name}/below")
    step = g.node("Where", below, low, high, name=f"{name}/back")
    return g.node("Mul", x, step, name=f"{name}/value")


def _twin_softmax(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    low, high = array(grid.low), array(grid.high)
    end = low * np.float32(grid.n_fine - 1)
    first = np.floor(end / high) + 1
    last = grid.n_codes - 1 - grid.zero
    fine = g.node("Div", x, g.shared(low), name=f"{name}/fine_ratio")
    fine = g.node("Round", fine, name=f"{name}/fine_rounded")
    fine = g.node("Clip", fine, g.number(0), g.number(grid.n_fine - 1), name=f"{name}/fine_steps")
    fine = g.node("Mul", fine, g.shared(low), name=f"{name}/fine")
    if not (first <= last).any():
        return fine
    coarse = g.node("Div", x, g.shared(high), name=f"{name}/coarse_ratio")
    coarse = g.node("Round", coarse, name=f"{name}/coarse_rounded")
    coarse = g.node("Min", coarse, g.number(last), name=f"{name}/coarse_limited")
    coarse = g.node("Max", coarse, g.shared(first), name=f"{name}/coarse_steps")
    coarse = g.node("Mul", coarse, g.shared(high), name=f"{name}/coarse")
    border = np.where(first <= last, (end + first * high) / 2, np.inf).astype(np.float32)
    beyond = g.node("Greater", x, g.shared(border), name=f"{name}/beyond")
    return g.node("Where", beyond, coarse, fine, name=f"{name}/value")


_QUANTIZERS: dict[type[Quantizer], Callable[[GraphBuilder, Any, str, str], str]] = {
    UniformQuantizer: _uniform,
    LogQuantizer: _log,
    TokenQuantizer: _token,
    PrefixQuantizer: _prefix,
    TwinGeluQuantizer: _twin_gelu,
    TwinSoftmaxQuantizer: _twin_softmax,
}

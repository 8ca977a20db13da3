"""Quantizers as ONNX nodes: float operators that give the values of the torch module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lampq.artifact.onnx.builder import Array, GraphBuilder
from lampq.errors import ExportError
from lampq.quant.base import Quantizer
from lampq.quant.log import SMALLEST, LogQuantizer
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import SMALLEST as SMALLEST_STEP
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer
from lampq.quant.twin import TwinGeluQuantizer, TwinSoftmaxQuantizer
from lampq.quant.uniform import UniformQuantizer

# of a slice up to the last
END: int = np.iinfo(np.int64).max


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
    return on_grids(g, Grids.of(grid), -1, name, x)


def _token(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    return on_grids(g, Grids.of(grid), grid.axis, name, x)


@dataclass(frozen=True, slots=True)
class Grids:
    """Evenly spaced grids, of one value or of many that differ from token to token.

    All arrays can be broadcast to (..., tokens, channels), or (..., channels, tokens) for keys.
    ``last`` are the last codes. Grids that are ``ranged`` take a part ``clip`` of the range of
    their token; the others have a ``scale`` and their least value ``low``, in steps, of their own.
    """

    last: Array
    ranged: Array
    clip: Array
    scale: Array
    low: Array

    @classmethod
    def of(cls, grid: Any) -> Grids:
        """The grid of a uniform quantizer or of one with ranges per token."""
        last, one = np.array(2**grid.bits - 1, np.float32), np.ones((), np.float32)
        ranged = np.array(isinstance(grid, TokenQuantizer))
        if ranged:
            return cls(last, ranged, array(grid.clip), one, one)
        return cls(last, ranged, one, array(grid.scale), array(-grid.zero))

    @classmethod
    def of_prefix(cls, grid: PrefixQuantizer, tokens: int) -> Grids:
        """The grids of first tokens and of the others."""
        along, counts = -3 - grid.axis, (grid.count, tokens - grid.count)

        def joined(first: Array, others: Array) -> Array:
            shape = np.broadcast_shapes(np.shape(first), np.shape(others), (1, 1))
            pair = (np.broadcast_to(value, shape) for value in (first, others))
            parts = [np.repeat(v, n, axis=along) for v, n in zip(pair, counts, strict=True)]
            return np.concatenate(parts, axis=along)

        parts = (astuple(cls.of(part)) for part in (grid.prefix, grid.body))
        return cls(*(joined(*pair) for pair in zip(*parts, strict=True)))

    def by_heads(self, axis: int, heads: int, tokens: int) -> bool:
        """Whether all channels of a head have the same grid, one or so many along the tokens."""
        known = {-3: (1, heads), axis: (1,), -3 - axis: (1, tokens)}
        shapes = [np.broadcast_shapes(np.shape(v), (1, 1, 1)) for v in astuple(self)]
        return all(len(s) == 3 and all(s[i] in n for i, n in known.items()) for s in shapes)

    def of_heads(self, axis: int, heads: int) -> Grids:
        """The same for values (tokens, heads, channels); ``axis`` is where the channels were."""

        def turned(value: Array) -> Array:
            value = np.broadcast_to(value, np.broadcast_shapes(np.shape(value), (heads, 1, 1)))
            return np.moveaxis(value if axis == -1 else value.swapaxes(-1, -2), 0, 1)

        return Grids(*map(turned, astuple(self)))

    @classmethod
    def side_by_side(cls, parts: Sequence[Grids]) -> Grids:
        """One after the other along the heads."""

        def joined(*values: Array) -> Array:
            tokens = max(len(value) for value in values)
            return np.concatenate([np.repeat(v, tokens // len(v), axis=0) for v in values], axis=1)

        return cls(*(joined(*group) for group in zip(*map(astuple, parts), strict=True)))


def _prefix(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    if _even(grid) and g.tokens is not None and grid.count < g.tokens:
        # half the nodes of two parts, and none of the tokens is copied
        return on_grids(g, Grids.of_prefix(grid, g.tokens), grid.axis, name, x)
    first, others = cut(g, grid, name, x)
    first = quantizer(g, grid.prefix, f"{name}/first", first)
    others = quantizer(g, grid.body, f"{name}/others", others)
    return g.node("Concat", first, others, name=f"{name}/tokens", axis=-3 - grid.axis)


def _even(grid: Quantizer | None) -> bool:
    """Whether all tokens have evenly spaced grids."""
    if isinstance(grid, PrefixQuantizer):
        return _even(grid.prefix) and _even(grid.body)
    return isinstance(grid, TokenQuantizer | UniformQuantizer)


def grids_of_heads(g: GraphBuilder, parts: Sequence[Quantizer | None], heads: int) -> Grids | None:
    """The grids of values (tokens, heads of all parts, channels), as many heads of each part.

    None if some are not evenly spaced.
    """
    found = []
    for grid in parts:
        axis, tokens = getattr(grid, "axis", -1), 1
        if not _even(grid):
            return None
        if isinstance(grid, PrefixQuantizer):
            tokens = g.tokens or 0
            if grid.count >= tokens:
                return None
            of_all = Grids.of_prefix(grid, tokens)
        else:
            of_all = Grids.of(grid)
        if not of_all.by_heads(axis, heads, tokens):
            return None
        found.append(of_all.of_heads(axis, heads))
    return Grids.side_by_side(found)


def cut(g: GraphBuilder, grid: PrefixQuantizer, name: str, x: str) -> tuple[str, str]:
    """The first tokens and the others."""
    along, names = -3 - grid.axis, [f"{name}/first_tokens", f"{name}/other_tokens"]
    if g.tokens is not None and grid.count < g.tokens:
        counts = g.whole(grid.count, g.tokens - grid.count)
        first, others = g.nodes("Split", x, counts, name=f"{name}/cut", outputs=names, axis=along)
    else:
        first = sliced(g, x, 0, grid.count, along, names[0])
        others = sliced(g, x, grid.count, END, along, names[1])
    if x in g.never_negative:
        g.never_negative |= {first, others}
    return first, others


def sliced(g: GraphBuilder, x: str, start: int, end: int, axis: int, name: str) -> str:
    """A part of a value along one axis."""
    # with a step, though it is one: OpenVINO takes three nodes to find out by itself
    limits = (g.whole(value) for value in (start, end, axis, 1))
    return g.node("Slice", x, *limits, name=name)


def on_grids(g: GraphBuilder, grids: Grids, axis: int, name: str, x: str) -> str:
    """A value on its grids; ``axis`` is where the channels of a token are."""
    scale, low = _scales(g, grids, axis, name, x)
    x = g.node("Div", x, scale, name=f"{name}/ratio")
    if low is not None:
        x = g.node("Sub", x, low, name=f"{name}/moved")
    x = g.node("Round", x, name=f"{name}/rounded")
    last = _smallest(grids.last)
    if last.ndim == 0:
        x = g.node("Clip", x, g.number(0), g.shared(last), name=f"{name}/codes")
    else:
        x = g.node("Max", x, g.number(0), name=f"{name}/raised")
        x = g.node("Min", x, g.shared(last), name=f"{name}/codes")
    if low is not None:
        x = g.node("Add", x, low, name=f"{name}/steps")
    return g.node("Mul", x, scale, name=f"{name}/value")


def _scales(g: GraphBuilder, grids: Grids, axis: int, name: str, x: str) -> tuple[str, str | None]:
    """Scales, and least values in steps; None if the latter are zero."""
    if grids.ranged.all():
        return _token_scales(g, grids, axis, name, x)
    scale, low = (g.shared(_smallest(value)) for value in (grids.scale, grids.low))
    if not grids.ranged.any():
        return scale, low
    own = g.shared(_smallest(grids.ranged))
    own_scale, own_low = _token_scales(g, grids, axis, name, x)
    return (
        g.node("Where", own, own_scale, scale, name=f"{name}/scales"),
        g.node("Where", own, own_low or g.number(0), low, name=f"{name}/lows"),
    )


def _token_scales(
    g: GraphBuilder, grids: Grids, axis: int, name: str, x: str
) -> tuple[str, str | None]:
    """The same for grids with ranges per token."""
    none, low = g.number(0), None
    high = g.node("ReduceMax", x, name=f"{name}/most", axes=[axis], keepdims=1)
    if x not in g.never_negative:
        high = g.node("Max", high, none, name=f"{name}/high")
        low = g.node("ReduceMin", x, name=f"{name}/least", axes=[axis], keepdims=1)
        low = g.node("Min", low, none, name=f"{name}/low")
        high = g.node("Sub", high, low, name=f"{name}/range")
    step = g.node("Div", high, g.shared(_smallest(grids.last)), name=f"{name}/share")
    step = g.node("Max", step, g.number(SMALLEST_STEP), name=f"{name}/step")
    first = None if low is None else g.node("Div", low, step, name=f"{name}/first")
    if np.all(grids.clip == 1):
        return step, first
    return g.node("Mul", step, g.shared(_smallest(grids.clip)), name=f"{name}/scale"), first


def _smallest(value: Array) -> Array:
    """The smallest array that is broadcast to the same one."""
    value = np.asarray(value)
    for axis in range(value.ndim):
        first = np.take(value, [0], axis=axis)
        value = first if np.all(value == first) else value
    return value.reshape(()) if value.size == 1 else value


def _log(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    x = _shifted(g, grid, name, x)
    x = g.node("Div", x, g.shared(array(grid.scale)), name=f"{name}/ratio")
    return _power(g, grid, name, x)


def _token_log(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    x = _shifted(g, grid, name, x)
    scale = g.node("ReduceMax", x, name=f"{name}/most", axes=[grid.axis], keepdims=1)
    scale = g.node("Max", scale, g.number(SMALLEST_STEP), name=f"{name}/size")
    clip = array(grid.clip)
    if np.any(clip != 1):
        scale = g.node("Mul", scale, g.shared(_smallest(clip)), name=f"{name}/scale")
    x = g.node("Div", x, scale, name=f"{name}/ratio")
    x = _power(g, grid.powers(torch.ones(1)), name, x)
    x = g.node("Mul", x, scale, name=f"{name}/sized")
    shift = array(grid.shift)
    return g.node("Sub", x, g.shared(shift), name=f"{name}/moved") if shift.any() else x


def _shifted(g: GraphBuilder, grid: Any, name: str, x: str) -> str:
    shift = array(grid.shift)
    return g.node("Add", x, g.shared(shift), name=f"{name}/shifted") if shift.any() else x


def _power(g: GraphBuilder, grid: LogQuantizer, name: str, x: str) -> str:
    """The value of the nearest power to parts of the scale."""
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
    TokenLogQuantizer: _token_log,
    PrefixQuantizer: _prefix,
    TwinGeluQuantizer: _twin_gelu,
    TwinSoftmaxQuantizer: _twin_softmax,
}

"""What the weights and inputs of every layer look like beside the levels of their quantizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lampq.methods import FitCache
from lampq.methods.base import LinearView, rows_output
from lampq.quant.base import CodedQuantizer, Quantizer
from lampq.quant.modules import LayerFit
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import PerToken
from lampq.types import BitPlan

HISTOGRAMS_VERSION = 1
BINS = 80
# more of a layer than this is thinned out evenly
MAX_TOKENS = 256
MAX_WEIGHTS = 2**18
# a tail outside both the levels and this share of the values is counted, not drawn
TAIL = 0.001


def histograms_json(fits: FitCache, plan: BitPlan) -> dict[str, Any]:
    """The content of histograms.json: all quantized layers at the widths of the plan."""
    layers, _ = fits.of_plan(plan)
    return {
        "histograms_version": HISTOGRAMS_VERSION,
        "tokens": MAX_TOKENS,
        "layers": {fit.spec.name: layer_json(fits, fit) for fit in layers},
    }


@torch.no_grad()
def layer_json(fits: FitCache, fit: LayerFit) -> dict[str, Any]:
    """Histograms of one layer as its quantizers see it, and the error of its output.

    A fold is applied to both sides. ``error`` is that of ``FitCache.error``, on fewer tokens.
    """
    view = LinearView.of(fits.model, fit.spec)
    stats = fits.stats(fit.spec.name)
    inputs = thinned(stats.inputs, MAX_TOKENS)
    first = None if stats.first is None else thinned(stats.first, MAX_TOKENS)
    exact = inputs @ view.weight.T
    wrong = rows_output(fit, inputs, first) - view.bias - exact
    weight, seen = view.weight, inputs
    if fit.fold is not None:
        weight, seen = weight * fit.fold.ratio, fit.fold.of_inputs(inputs)
    rows = thinned(weight, max(1, MAX_WEIGHTS // weight.shape[1]))
    grids = thinned(levels(fit.weight_quantizer, len(weight), "rows"), len(rows))
    content = {
        "weight": {**about(fit.weight_quantizer), **histogram(rows, grids)},
        "input": None,
        "error": _short(float(wrong.square().sum() / exact.square().sum().clamp_min(1e-30))),
    }
    quantizer = fit.input_quantizer
    if isinstance(quantizer, PrefixQuantizer):
        assert first is not None, "statistics say which tokens are of the prefix"
        quantizer, seen = quantizer.body, seen[~first]
    if isinstance(quantizer, PerToken):
        grids = levels(quantizer.at(seen), len(seen), "rows")
        content["input"] = {**about(quantizer), **histogram(seen, grids)}
    elif isinstance(quantizer, CodedQuantizer):
        grids = levels(quantizer, seen.shape[1], "columns") - quantizer.lift
        content["input"] = {**about(quantizer), **histogram(seen.T, grids)}
    return content


def about(quantizer: Quantizer) -> dict[str, Any]:
    """Kind and width of a quantizer."""
    return {"kind": quantizer.kind, "bits": quantizer.bits}


def thinned(rows: Tensor, most: int) -> Tensor:
    """At most that many rows, evenly spaced."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most).round().long()]


def levels(quantizer: CodedQuantizer, channels: int, along: str) -> Tensor:
    """The decoded value of every code, ascending, for each of the channels: (channels, codes).

    ``along``: a weight has its channels in "rows", an input in "columns". Where each token has its
    own grid, tokens take the place of channels.
    """
    codes = torch.arange(quantizer.n_codes)
    if along == "rows":
        values = quantizer.decode(codes[None].expand(channels, -1))
    else:
        values = quantizer.decode(codes[:, None].expand(-1, channels)).T
    return values.float().sort(dim=1).values


def histogram(values: Tensor, grids: Tensor) -> dict[str, Any]:
    """Counts of values (channels, n) beside the levels of their channels (channels, codes).

    Where all channels have one grid, the axis is the value. Where each has its own, the axis is the
    place between the levels of the channel (``unit`` "step"): level k is at k.
    """
    values = values.float()
    shared = bool((grids == grids[:1]).all())
    if shared:
        marks = grids[0][torch.cat([torch.tensor([True]), grids[0].diff() > 0])]
        points = values.flatten()
    else:
        marks = torch.arange(grids.shape[1], dtype=torch.float32)
        points = places(values, grids).flatten()
    few = thinned(points, 2**16).sort().values
    cut = int(TAIL * len(few))
    low = min(float(marks[0]), float(few[cut]))
    high = max(float(marks[-1]), float(few[-1 - cut]))
    margin = 0.02 * (high - low) or 0.5
    low, high = low - margin, high + margin
    return {
        "unit": "value" if shared else "step",
        "low": _short(low),
        "high": _short(high),
        "counts": torch.histc(points, BINS, low, high).int().tolist(),
        "below": int((points < low).sum()),
        "above": int((points > high).sum()),
        "levels": compact(marks),
    }


def places(values: Tensor, grids: Tensor) -> Tensor:
    """Where each value is among the ascending levels of its channel; level k is at k.

    Between two levels the place is interpolated, beyond the last ones continued.
    """
    right = torch.searchsorted(grids.contiguous(), values.contiguous())
    right = right.clamp(1, grids.shape[1] - 1)
    above, below = grids.gather(1, right), grids.gather(1, right - 1)
    return right - 1 + (values - below) / (above - below).clamp_min(1e-30)


def compact(marks: Tensor) -> Mapping[str, float] | list[float]:
    """Levels as first, step and count where they are evenly spaced, else one by one."""
    gaps = marks.diff()
    if len(marks) > 2 and bool((gaps - gaps.mean()).abs().max() <= 1e-3 * gaps.mean()):
        return {
            "first": _short(float(marks[0])),
            "step": _short(float(gaps.double().mean()), 8),
            "count": len(marks),
        }
    return [_short(float(mark)) for mark in marks]


def _short(value: float, digits: int = 6) -> float:
    """The number with few digits: the file is for looking at."""
    return float(f"{value:.{digits}g}")

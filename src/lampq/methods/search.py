"""Candidate grids and the progressive search that the methods share.

The search follows AdaLog's fast progressive combining search (Wu et al., ECCV 2024): a coarse grid
of scales and zero points, then finer and finer steps of scale around the survivors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lampq.quant.log import DENOMINATOR
from lampq.quant.uniform import uniform_round

Error = Callable[[Tensor, Tensor], Tensor]
"""Squared errors (candidates, groups) at scales and zero points (candidates, groups)."""
CHUNK = 2**18


@dataclass(frozen=True, slots=True)
class Grid:
    """Candidates (candidates, groups) and the spacing of their scales (groups,)."""

    scale: Tensor
    zero: Tensor
    spacing: Tensor


@dataclass(frozen=True, slots=True)
class SearchDepth:
    """How much of the candidate space is scored.

    ``screen`` candidates, the best by the cheap error, are scored by the true one (0: all of
    them are). ``survivors`` of these are refined ``steps`` - 1 times with ``offsets`` new scales.
    Of the logarithmic bases of a softmax every ``stride``-th is scored, then those near the best.
    """

    candidates: int = 128
    screen: int = 16
    survivors: int = 3
    offsets: int = 6
    steps: int = 3
    stride: int = 6


# AdaLog's own numbers: every candidate is scored by the true error, six steps
EXHAUSTIVE = SearchDepth(screen=0, survivors=16, offsets=8, steps=6, stride=1)


def quantiles(rows: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Lower and upper quantile of each row (groups, values), without a limit on the size."""
    n = rows.shape[1]
    k = min(n, round((1 - share) * n) + 1)
    return rows.kthvalue(k, dim=1).values, rows.kthvalue(n + 1 - k, dim=1).values


def uniform_grid(
    rows: Tensor, bits: int, *, candidates: int, max_zeros: int, affine: bool = False
) -> Grid:
    """Scales between the 0.9 quantile range and the full range, zero points around the middle.

    The zero point of the full range is always among them. ``affine`` is the one-bit reading with
    two free levels instead of {0, scale}.
    """
    top = 2**bits - 1
    near_low, near_high = quantiles(rows, 0.9)
    low, high = rows.amin(dim=1), rows.amax(dim=1)
    count = min(max_zeros, 16)
    middle = 2 ** (bits - 1)
    around = torch.arange(count, dtype=rows.dtype) + (middle - count // 2)
    span = (high - low).clamp_min(1e-8)
    own = -low / span * top
    if affine and bits == 1:
        zeros = torch.stack([torch.full_like(own, 0.5), own])
        narrow = 0.5 * (near_high - near_low)
    else:
        zeros = torch.cat([around[:, None].expand(-1, len(rows)), own.round().clamp(0, top)[None]])
        narrow = near_high - near_low
    narrow = torch.minimum(narrow.clamp_min(1e-8), span)
    steps = max(2, candidates // count)
    ramp = torch.linspace(0, 1, steps, dtype=rows.dtype)[:, None]
    scales = (narrow + ramp * (span - narrow)) / top  # (steps, groups)
    shape = (steps, len(zeros), len(rows))
    return Grid(
        scale=scales[:, None].expand(shape).flatten(0, 1),
        zero=zeros[None].expand(shape).flatten(0, 1),
        spacing=(span - narrow) / top / (steps - 1),
    )


def _score(error: Error, scale: Tensor, zero: Tensor, elements: int) -> Tensor:
    """Errors of all candidates, so many at a time that their tensors stay in the cache."""
    size = max(1, CHUNK // elements)
    pieces = zip(torch.split(scale, size), torch.split(zero, size), strict=True)
    return torch.cat([error(s, z) for s, z in pieces])


def _best(errors: Tensor, count: int, *columns: Tensor) -> list[Tensor]:
    index = errors.topk(min(count, len(errors)), dim=0, largest=False).indices
    return [column.gather(0, index) for column in columns]


def progressive_search(
    grid: Grid, error: Error, depth: SearchDepth, *, elements: int, cheap: Error | None = None
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of least error, for each group (groups,).

    ``elements`` is the number of values that one candidate quantizes. The zero point may be any
    second parameter: it is carried along, not refined.
    """
    scale, zero, spacing = grid.scale, grid.zero, grid.spacing
    if cheap is not None and depth.screen:
        scale, zero = _best(_score(cheap, scale, zero, elements), depth.screen, scale, zero)
    survivors = depth.survivors if depth.steps > 1 else 1
    scale, zero = _best(_score(error, scale, zero, elements), survivors, scale, zero)
    offsets = torch.linspace(-0.5, 0.5, depth.offsets, dtype=scale.dtype)
    for step in range(1, depth.steps):
        moved = scale[:, None] + offsets[:, None] * spacing  # (survivors, offsets, groups)
        # the survivors stay in the race, so that a step never loses ground
        scale = torch.cat([scale, torch.where(moved > 0, moved, scale[:, None]).flatten(0, 1)])
        zero = torch.cat([zero, zero[:, None].expand(moved.shape).flatten(0, 1)])
        survivors = depth.survivors if step < depth.steps - 1 else 1
        scale, zero = _best(_score(error, scale, zero, elements), survivors, scale, zero)
        spacing = spacing / (depth.offsets - 0.5)
    return scale[0], zero[0]


def on_grid(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """X rounded to a uniform grid."""
    return uniform_round(x, scale, zero, bits).sub_(zero).mul_(scale)


def clip_grid(groups: int, like: Tensor) -> Grid:
    """Parts of the range of a token, for each group; what is carried along is not used."""
    clips = torch.linspace(0.1, 1, 37, dtype=like.dtype)[:, None].expand(-1, groups)
    return Grid(scale=clips, zero=clips, spacing=clips[1] - clips[0])


def log_decoded(logs: Tensor, scale: Tensor, step: Tensor, powers: int) -> Tensor:
    """The nearest of so many powers to 2**logs, by the smooth formula that the table rounds."""
    codes = (scale.log2() - logs).mul_(DENOMINATOR / step).round_().clamp_min_(0)
    beyond = codes >= powers
    return codes.mul_(-step / DENOMINATOR).exp2_().mul_(scale).masked_fill_(beyond, 0.0)


def spread(tensor: Tensor, count: int) -> Tensor:
    """At most ``count`` rows, evenly spread."""
    if len(tensor) <= count:
        return tensor
    return tensor[torch.linspace(0, len(tensor) - 1, count).long()]

"""Patch-similarity entropy (PSAQ-ViT, Li et al., ECCV 2022).

On a real picture the patches of object and background answer differently to an attention, and the
similarities of pairs of patches spread out. On noise they are all alike. The entropy of their
distribution, estimated by a kernel density, tells the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BANDWIDTH = 0.01
POINTS = 10
# keeps the logarithm finite where there is no density
FLOOR = 1e-4
CHUNK = 2**16
FAR = 80.0


def pair_similarities(mixed: Tensor, heads: int, images: int, prefix: int) -> tuple[Tensor, int]:
    """Cosine similarity of every pair of patches, (images, pairs), and the patches of one image.

    ``mixed`` is what an attention gives to its projection, (images * windows, tokens, channels),
    head by head. It is averaged over heads. The first ``prefix`` tokens are no patches. Pairs are
    those within a window, each once; the windows of one image are joined.
    """
    kept = mixed[:, prefix:]
    count = kept.shape[1]
    patches = kept.reshape(len(kept), count, heads, -1).mean(dim=2)
    patches = F.normalize(patches, dim=-1, eps=1e-8)
    similar = patches @ patches.transpose(1, 2)
    first, second = torch.triu_indices(count, count, 1, device=mixed.device)
    pairs = similar.flatten(1).index_select(1, first * count + second)
    return pairs.reshape(images, -1), len(mixed) // images * count


class _Density(torch.autograd.Function):
    """Gaussian kernel density; memory is that of the values, whatever the number of points."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, points: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(values, points)
        ctx.bandwidth = bandwidth
        estimate = values.new_empty(len(values), len(points))
        for rows in _chunks(values):
            for column, point in enumerate(points):
                away = (values[rows] - point).div_(bandwidth)
                estimate[rows, column] = _bell(away).sum(dim=1)
        return estimate.div_(bandwidth * math.sqrt(2 * math.pi) * values.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        values, points = ctx.saved_tensors
        bandwidth = ctx.bandwidth
        total = torch.zeros_like(values)
        for rows in _chunks(values):
            sums = total[rows]
            for column, point in enumerate(points):
                away = (point - values[rows]).div_(bandwidth)
                sums.addcmul_(_bell(away.clone()).mul_(gradient[rows, column, None]), away)
        return total.div_(bandwidth**2 * math.sqrt(2 * math.pi) * values.shape[1]), None, None


def _chunks(values: Tensor) -> Iterator[slice]:
    """Rows at a time, so that they stay in the cache."""
    size = max(1, CHUNK // values.shape[1])
    return (slice(start, start + size) for start in range(0, len(values), size))


def _bell(away: Tensor) -> Tensor:
    """exp(-x**2 / 2), in place; far out a number too small to count, as underflow is slow."""
    return away.square_().clamp_max_(2 * FAR).mul_(-0.5).exp_()


def density(values: Tensor, points: Tensor, bandwidth: float = BANDWIDTH) -> Tensor:
    """Kernel density of each row (rows, values) at the points, (rows, points)."""
    estimate: Tensor = _Density.apply(values, points, bandwidth)
    return estimate


def differential_entropy(estimate: Tensor, points: Tensor) -> Tensor:
    """Minus the integral of p log p over the points by the trapezoidal rule, one per row."""
    raised = estimate + FLOOR
    return torch.trapezoid(-raised * raised.log(), points, dim=-1)


def patch_entropy(mixed: Tensor, heads: int, images: int, prefix: int) -> Tensor:
    """Mean over images of the entropy of the similarities of all patches with all, one number.

    As published, the density is taken at ten points between the least similarity of the batch and
    one, which a patch has with itself; the gradient leaves these points where they are.
    """
    pairs, patches = pair_similarities(mixed, heads, images, prefix)
    if not pairs.shape[1]:
        return mixed.new_zeros(())
    low = min(float(pairs.detach().min()), 1.0)
    points = torch.linspace(low, 1.0, POINTS, dtype=mixed.dtype, device=mixed.device)
    # a pair counts twice, and every patch once with itself
    whole = 2 * pairs.shape[1] + patches
    own = density(torch.ones(1, 1).to(points), points)[0]
    estimate = (density(pairs, points) * (2 * pairs.shape[1]) + own * patches) / whole
    return differential_entropy(estimate, points).mean()

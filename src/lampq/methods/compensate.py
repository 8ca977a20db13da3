"""Weights that make up for the quantization of the input and of each other.

Two steps that can be taken apart: ridge regression refits the weight to the quantized input, and
GPTQ (Frantar et al., ICLR 2023) rounds it column by column, each error being spread over the
columns still free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lampq.quant.base import compact
from lampq.quant.uniform import UniformQuantizer

DAMPING = 0.01
BLOCK = 64
# a layer with more inputs is compensated in parts: its Gram matrix would not fit into memory
MOST_INPUTS = 4096


def compensated_codes(
    weight: Tensor,
    bias: Tensor,
    inputs: Tensor,
    quantized: Tensor,
    grid: UniformQuantizer,
    shares: Tensor | None = None,
    damping: float = DAMPING,
) -> tuple[Tensor, Tensor]:
    """Codes (outputs, inputs) of both steps on the given grid, and the bias that goes with them.

    ``shares``: how much the error of each token counts, one on average; all alike when not given.
    ``damping``: the share of the mean diagonal that is added to that of the Gram matrix.
    """
    if weight.shape[1] > MOST_INPUTS:
        count = -(-weight.shape[1] // MOST_INPUTS)
        parts = zip(*(x.chunk(count, dim=1) for x in (weight, inputs, quantized)), strict=True)
        pieces = []
        for own, seen, given in parts:
            piece, bias = compensated_codes(own, bias, seen, given, grid, shares, damping)
            pieces.append(piece)
        return torch.cat(pieces, dim=1), bias
    counts = torch.ones_like(inputs[:, 0]) if shares is None else shares
    mean = counts @ inputs / len(inputs)
    quantized_mean = counts @ quantized / len(inputs)
    root = counts.sqrt()[:, None]
    centred = ((quantized - quantized_mean) * root).double()
    exact = ((inputs - mean) * root).double() @ weight.double().T
    damped = damp(centred.T @ centred, damping)
    residual = exact - centred @ weight.double().T
    refitted = weight.double() + ridge(damped, centred.T @ residual).T
    codes = gptq_codes(refitted, damped, grid, act_order=True)
    decoded = grid.decode(codes)
    # the bias carries what is left of the mean error
    return codes, bias + weight @ mean - decoded @ quantized_mean


def damp(gram: Tensor, share: float) -> Tensor:
    """The Gram matrix with this share of its mean diagonal added to the diagonal."""
    return gram + share * gram.diagonal().mean().clamp_min(1e-12) * torch.eye(
        len(gram), dtype=gram.dtype, device=gram.device
    )


def ridge(damped: Tensor, cross: Tensor) -> Tensor:
    """The solution of ``damped @ x = cross``, by Cholesky factors."""
    return torch.cholesky_solve(cross, torch.linalg.cholesky(damped))


def gptq_codes(weight: Tensor, gram: Tensor, grid: UniformQuantizer, *, act_order: bool) -> Tensor:
    """Column-wise rounding with error feedback; weight and damped Gram matrix in float64.

    ``act_order`` takes the columns of the largest inputs first.
    """
    order = torch.arange(len(gram), device=gram.device)
    if act_order:
        order = gram.diagonal().argsort(descending=True)
    W = weight[:, order].clone()
    inverse = torch.linalg.inv(gram[order][:, order])
    U = torch.linalg.cholesky(inverse, upper=True)
    codes = torch.empty_like(W)
    scale, zero = grid.scale.double().squeeze(1), grid.zero.double().squeeze(1)
    top = grid.n_codes - 1
    for start in range(0, W.shape[1], BLOCK):
        stop = min(start + BLOCK, W.shape[1])
        errors = torch.empty_like(W[:, start:stop])
        for j in range(start, stop):
            code = (W[:, j] / scale + zero).round().clamp(0, top)
            codes[:, j] = code
            e = (W[:, j] - (code - zero) * scale) / U[j, j]
            W[:, j:stop] -= e[:, None] * U[j, j:stop]
            errors[:, j - start] = e
        W[:, stop:] -= errors @ U[start:stop, stop:]
    return compact(codes[:, order.argsort()], grid.bits)

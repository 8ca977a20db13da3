"""Weight codes that make up for the quantization of the input and of each other.

First the weight and bias are refitted to the quantized input by ridge regression, then rounded
column by column as in GPTQ (Frantar et al., ICLR 2023), each error being spread over the columns
still free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lampq.quant.uniform import UniformQuantizer

DAMPING = 0.01


def compensated_codes(
    weight: Tensor, bias: Tensor, inputs: Tensor, quantized: Tensor, grid: UniformQuantizer
) -> tuple[Tensor, Tensor]:
    """Codes (outputs, inputs) on the given grid, and the bias that goes with them."""
    mean = inputs.mean(dim=0)
    quantized_mean = quantized.mean(dim=0)
    centred = (quantized - quantized_mean).double()
    exact = (inputs - mean).double() @ weight.double().T
    gram = centred.T @ centred
    damped = gram + DAMPING * gram.diagonal().mean().clamp_min(1e-12) * torch.eye(
        len(gram), dtype=gram.dtype
    )
    residual = exact - centred @ weight.double().T
    refitted = weight.double() + torch.linalg.solve(damped, centred.T @ residual).T
    codes = _gptq(refitted, damped, grid)
    decoded = grid.decode(codes)
    # the bias carries what is left of the mean error
    return codes, bias + weight @ mean - decoded @ quantized_mean


def _gptq(weight: Tensor, gram: Tensor, grid: UniformQuantizer) -> Tensor:
    """Column-wise rounding with error feedback; weight and gram in float64."""
    order = gram.diagonal().argsort(descending=True)
    W = weight[:, order].clone()
    inverse = torch.linalg.inv(gram[order][:, order])
    U = torch.linalg.cholesky(inverse, upper=True)
    codes = torch.empty_like(W)
    scale, zero = grid.scale.double().squeeze(1), grid.zero.double().squeeze(1)
    top = grid.n_codes - 1
    block = 64
    for start in range(0, W.shape[1], block):
        stop = min(start + block, W.shape[1])
        errors = torch.empty_like(W[:, start:stop])
        for j in range(start, stop):
            code = (W[:, j] / scale + zero).round().clamp(0, top)
            codes[:, j] = code
            e = (W[:, j] - (code - zero) * scale) / U[j, j]
            W[:, j:stop] -= e[:, None] * U[j, j:stop]
            errors[:, j - start] = e
        W[:, stop:] -= errors @ U[start:stop, stop:]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return codes[:, back].to(torch.uint8)

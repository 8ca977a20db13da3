"""Least squares for one layer in a quantized model, with a ridge towards its float weight."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lampq.methods.compensate import damp, gptq_codes, ridge
from lampq.methods.search import SearchDepth, on_grid, progressive_search, uniform_grid
from lampq.quant.modules import LayerFit, applied
from lampq.quant.uniform import UniformQuantizer

# where the mean token is so many times as large as the middle one, few of them make the output
UNEVEN = 10.0


class Problem:
    """Least squares for one layer: sums over tokens, and what solves them.

    ``counts``: how much each position of the layer's output counts, one on average.
    """

    def __init__(self, fit: LayerFit, layer: nn.Module, counts: Tensor) -> None:
        assert isinstance(layer, nn.Linear), "only linear layers are solved"
        self.fit, self.counts = fit, counts
        bias = layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
        self.weight, self.bias = layer.weight.detach(), bias.detach()
        if fit.fold is not None:
            self.weight, self.bias = fit.fold.of_linear(self.weight, self.bias)
        outputs, inputs = self.weight.shape
        self.gram, self.cross = _zeros(inputs, inputs), _zeros(inputs, outputs)
        self.inputs, self.targets, self.total = _zeros(inputs), _zeros(outputs), 0.0
        self.middle = self.relative = self.plain = 1.0
        self.uneven = False

    def exact(self, inputs: Tensor) -> Tensor:
        """What the float layer gives on these inputs."""
        return inputs @ self.weight.T + self.bias

    def add(self, inputs: Tensor, output: Tensor, target: Tensor) -> None:
        """Count tokens; ``output``, of the float layer, tells how large each is."""
        t = target.flatten(0, -2)
        size = output.flatten(0, -2).square().sum(dim=1)
        if not self.total:
            self._measure(size)
        # half of the weight is that of errors as they are, half that of errors in parts of a token
        share = 1 / (size + self.middle) / self.relative + 1 / self.plain
        share = share * self.counts.repeat(len(t) // len(self.counts))
        quantized = applied(self.fit.input_quantizer, inputs).flatten(0, -2)
        weighed = quantized * share[:, None]
        self.gram += (weighed.T @ quantized).double()
        self.cross += (weighed.T @ t).double()
        self.inputs += weighed.sum(dim=0).double()
        self.targets += (share @ t).double()
        self.total += float(share.sum())

    def _measure(self, size: Tensor) -> None:
        self.middle = float(size.median().clamp_min(1e-30))
        self.relative = float((size / (size + self.middle)).mean())
        self.plain = float(size.mean().clamp_min(1e-30))
        self.uneven = self.plain > UNEVEN * self.middle

    def solved(self, hold: float) -> LayerFit:
        """The fit of least error whose weight is held at the float one."""
        mean, wanted = self.inputs / self.total, self.targets / self.total
        gram = self.gram - self.total * torch.outer(mean, mean)
        cross = self.cross - self.total * torch.outer(mean, wanted)
        damped = damp(gram, hold)
        weight = self.weight.double()
        weight = weight + ridge(damped, cross - gram @ weight.T).T
        grid = _nearest_grid(weight.float(), gram.diagonal().float(), self.fit.bits.weight)
        codes = gptq_codes(weight, damped, grid, act_order=True)
        bias = wanted - grid.decode(codes).double() @ mean
        return replace(self.fit, codes=codes, bias=bias.float(), weight_quantizer=grid)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def _nearest_grid(weight: Tensor, power: Tensor, bits: int) -> UniformQuantizer:
    """One grid per row, of least squared error of the weight with inputs of this power."""

    def error(scale: Tensor, zero: Tensor) -> Tensor:
        decoded = on_grid(weight, scale[..., None], zero[..., None], bits)
        return decoded.sub_(weight).square_() @ power

    depth = SearchDepth()
    zeros = max(1, 2 ** (bits - 1))
    grid = uniform_grid(weight, bits, candidates=depth.candidates, max_zeros=zeros, affine=True)
    scale, zero = progressive_search(grid, error, depth, elements=weight.numel())
    return UniformQuantizer(bits, scale[:, None], zero[:, None])

"""What is not a code, in half precision: scales of weights, biases, norms, embeddings.

The model itself is rounded, so that what is scored is what the file holds.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lampq.quant.modules import QuantLayer, QuantMatMul, QuantSum

# relative error of rounding to the nearest half
ROUNDING = 2.0**-11


def is_half(values: Tensor) -> bool:
    """Whether every value is a half-precision number already."""
    return values.dtype == torch.float32 and bool((values.half().float() == values).all())


def _nearest(values: Tensor, *, each: bool) -> Tensor:
    """The values as half-precision numbers, or as they are if that loses more than rounding.

    The error is measured against the largest value, with ``each`` against every single one.
    """
    rounded = values.half().float()
    allowed = ROUNDING * (values.abs() if each else values.abs().max())
    return rounded if bool(((rounded - values).abs() <= allowed).all()) else values


@torch.no_grad()
def halved(model: nn.Module) -> nn.Module:
    """A copy of a quantized model, rounded to half but for codes and quantizers of activations.

    Zero points stay as they are, and so does a tensor whose values are out of range.
    """
    rounded = copy.deepcopy(model)  # the model may share its quantizers with fits
    own: set[int] = set()
    for module in rounded.modules():
        if isinstance(module, QuantMatMul | QuantSum):
            own |= {id(part) for part in module.modules()}
        if isinstance(module, QuantLayer):
            own |= {id(part) for part in module.modules()}
            module.bias.copy_(_nearest(module.bias, each=False))
            scale = getattr(module.weight_quantizer, "scale", None)
            if isinstance(scale, Tensor):
                scale.copy_(_nearest(scale, each=True))
            module.weight.copy_(module.weight_quantizer.decode(module.codes).view_as(module.weight))
    for module in rounded.modules():
        if id(module) in own:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.float32:
                parameter.copy_(_nearest(parameter, each=False))
    return rounded

"""Quantized layers, matmuls and sums, and the model assembled from them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from lampq.errors import GraphError
from lampq.quant.base import CodedQuantizer, Quantizer, compact
from lampq.quant.fold import NormFold, fold_norm_
from lampq.types import LayerBits, LayerSpec, MatmulSpec, SumSpec


@dataclass(frozen=True, slots=True)
class LayerFit:
    """One layer quantized at one width: all that is needed to rebuild it.

    Attributes:
        spec: The layer.
        bits: Its widths.
        codes: Of the weight, (outputs, inputs), also for a convolution.
        bias: The final one: folds and shifts are in it.
        weight_quantizer: Decodes the codes.
        input_quantizer: Of the input; None where it stays in float.
        fold: A change of variable between the norm before the layer and the layer, or None.
        output_quantizer: Of the output; few methods have one.
    """

    spec: LayerSpec
    bits: LayerBits
    codes: Tensor
    bias: Tensor
    weight_quantizer: CodedQuantizer
    input_quantizer: Quantizer | None
    fold: NormFold | None = None
    output_quantizer: Quantizer | None = None

    @property
    def weight(self) -> Tensor:
        """The decoded weight, after folding."""
        return self.weight_quantizer.decode(self.codes)


@dataclass(frozen=True, slots=True)
class MatmulFit:
    """The operand quantizers of one attention matmul; None where an operand stays in float.

    Few methods quantize the product.
    """

    spec: MatmulSpec
    left: Quantizer | None
    right: Quantizer | None
    output: Quantizer | None = None


@dataclass(frozen=True, slots=True)
class SumFit:
    """The quantizer of one residual sum."""

    spec: SumSpec
    quantizer: Quantizer


SiteFit = MatmulFit | SumFit


def applied(quantizer: Quantizer | None, x: Tensor) -> Tensor:
    """X as the quantizer gives it, or as it is if there is none."""
    return x if quantizer is None else quantizer(x)


class QuantLayer(nn.Module):
    """A linear layer or convolution that multiplies decoded codes."""

    codes: Tensor
    bias: Tensor
    weight: Tensor

    def __init__(self, fit: LayerFit, weight_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.spec, self.bits = fit.spec, fit.bits
        self.register_buffer("codes", compact(fit.codes, fit.bits.weight))
        self.register_buffer("bias", fit.bias)
        self.register_buffer("weight", fit.weight.reshape(weight_shape), persistent=False)
        self.weight_quantizer = fit.weight_quantizer
        self.input_quantizer = fit.input_quantizer
        self.output_quantizer = fit.output_quantizer

    def _quantized_input(self, x: Tensor) -> Tensor:
        return applied(self.input_quantizer, x)

    def extra_repr(self) -> str:
        """Widths, for printing the model."""
        return f"bits={self.bits}"


class QuantLinear(QuantLayer):
    """Quantized ``nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """Linear map of the quantized input."""
        output = F.linear(self._quantized_input(x), self.weight, self.bias)
        return applied(self.output_quantizer, output)


class QuantConv2d(QuantLayer):
    """Quantized ``nn.Conv2d``."""

    def __init__(self, fit: LayerFit, conv: nn.Conv2d) -> None:
        super().__init__(fit, tuple(conv.weight.shape))
        self.stride = conv.stride
        self.padding = conv.padding
        self.dilation = conv.dilation

    def forward(self, x: Tensor) -> Tensor:
        """Convolution of the quantized input."""
        inputs = self._quantized_input(x)
        output = F.conv2d(inputs, self.weight, self.bias, self.stride, self.padding, self.dilation)
        return applied(self.output_quantizer, output)


class QuantConvTranspose2d(QuantLayer):
    """Quantized ``nn.ConvTranspose2d`` that makes a patch of every pixel, patches side by side."""

    def __init__(self, fit: LayerFit, conv: nn.ConvTranspose2d) -> None:
        super().__init__(fit, tuple(fit.codes.shape))
        self.patch = (int(conv.kernel_size[0]), int(conv.kernel_size[1]))

    def forward(self, x: Tensor) -> Tensor:
        """A linear map of the quantized pixels, its outputs (channels, rows, columns) a patch."""
        images, _, height, width = x.shape
        pixels = self._quantized_input(x).permute(0, 2, 3, 1)
        output = applied(self.output_quantizer, F.linear(pixels, self.weight, self.bias))
        # the channels by number: where nothing was found there are no images to tell them from
        channels = len(self.weight) // (self.patch[0] * self.patch[1])
        cut = output.view(images, height, width, channels, *self.patch).permute(0, 3, 1, 4, 2, 5)
        return cut.reshape(images, channels, height * self.patch[0], width * self.patch[1])


class QuantMatMul(nn.Module):
    """Matrix product of two quantized operands."""

    def __init__(self, fit: MatmulFit) -> None:
        super().__init__()
        self.left, self.right, self.output = fit.left, fit.right, fit.output

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """A @ b with operands and product quantized where there is a quantizer."""
        return applied(self.output, applied(self.left, a) @ applied(self.right, b))


class QuantSum(nn.Module):
    """Sum of two operands, quantized."""

    def __init__(self, fit: SumFit) -> None:
        super().__init__()
        self.quantizer = fit.quantizer

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """A + b, quantized."""
        total: Tensor = self.quantizer(a + b)
        return total


def quantized_site(fit: SiteFit) -> QuantMatMul | QuantSum:
    """The quantized form of a matmul or a sum."""
    return QuantMatMul(fit) if isinstance(fit, MatmulFit) else QuantSum(fit)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module at a dotted name of the model."""
    parent_name, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child, module)


def quantized_layer(fit: LayerFit, original: nn.Module) -> QuantLayer:
    """The quantized form of one float layer."""
    if isinstance(original, nn.Conv2d):
        return QuantConv2d(fit, original)
    if isinstance(original, nn.Linear):
        return QuantLinear(fit, tuple(original.weight.shape))
    if isinstance(original, nn.ConvTranspose2d):
        return QuantConvTranspose2d(fit, original)
    raise GraphError(f"{fit.spec.name!r} is a {type(original).__name__}, not a linear layer")


def assemble(
    model: nn.Module, layers: Iterable[LayerFit], sites: Iterable[SiteFit] = ()
) -> nn.Module:
    """A copy of the model (in its explicit form) with the fitted sites quantized."""
    quantized = copy.deepcopy(model)
    for fit in layers:
        install_(quantized, fit)
    for site in sites:
        replace_module(quantized, site.spec.name, quantized_site(site))
    for parameter in quantized.parameters():
        parameter.requires_grad = False
    return quantized.eval()


def install_(model: nn.Module, fit: LayerFit) -> None:
    """Replace one float layer of the model by its fit, and fold its norm."""
    original = model.get_submodule(fit.spec.name)
    replace_module(model, fit.spec.name, quantized_layer(fit, original))
    if fit.fold is not None:
        assert fit.spec.norm is not None, "a fold belongs to a layer with a norm"
        norm = model.get_submodule(fit.spec.norm)
        assert isinstance(norm, nn.LayerNorm), "discovery names affine LayerNorms only"
        fold_norm_(norm, fit.fold)

"""Quantized sites whose codes, scales and biases can be trained, and the way back to fits.

Codes are trained either freely, straight through a weight that is held in units of its scale, or
between the two nearest codes as in AdaRound (Nagel et al., ICML 2020). Scales are trained by their
logarithm, so that they stay positive and one learning rate suits all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.quant.base import Quantizer, compact
from lampq.quant.fold import absorb_shift
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import (
    LayerFit,
    MatmulFit,
    SiteFit,
    SumFit,
    install_,
    quantized_layer,
    quantized_site,
    replace_module,
)
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import PerToken, TokenLogQuantizer, TokenQuantizer, token_grid, token_size
from lampq.quant.uniform import UniformQuantizer
from lampq.reconstruct.straight import First, logarithmic, of_codes, uniform

Rounding = Literal["free", "nearest two"]
# the stretched sigmoid of AdaRound
LOW, HIGH = -0.1, 1.1
# how far from its code a free weight may start: at the border, where compensated codes would be,
# the first steps would undo what the codes make up for
REACH = 0.25


class TrainableQuantizer(nn.Module):
    """An activation quantizer with a trained scale, if its kind has one.

    That of a range per token is the part of the range that is taken; the range itself is no more
    trained than that of a static grid. Nor is what the first tokens have of their own.

    ``drop`` is the share of values that are left as they are (QDrop, Wei et al., ICLR 2022).
    """

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.whole = quantizer
        if isinstance(quantizer, PrefixQuantizer):
            quantizer = quantizer.body
        self.original = quantizer
        self.drop = 0.0
        self.log_scale: nn.Parameter | None = None
        if isinstance(quantizer, UniformQuantizer | LogQuantizer):
            self.log_scale = nn.Parameter(quantizer.scale.log())
        if isinstance(quantizer, PerToken):
            self.log_scale = nn.Parameter(quantizer.clip.log())

    def forward(self, x: Tensor) -> Tensor:
        """X rounded, or partly so; in single precision, as codes may lie close together."""
        x = x.float()
        whole = self.whole
        if isinstance(whole, PrefixQuantizer):
            own, _ = whole.parts(x.detach())
            rounded = self._rounded(x, First(whole.prefix(own), -3 - whole.axis))
        else:
            rounded = self._rounded(x)
        if not self.drop:
            return rounded
        return torch.where(torch.rand_like(x) < self.drop, x, rounded)

    def _rounded(self, x: Tensor, first: First | None = None) -> Tensor:
        quantizer = self.original
        if self.log_scale is None:
            return _straight(quantizer, x, first)
        scale = self.log_scale.exp()
        if isinstance(quantizer, UniformQuantizer):
            return uniform(x, scale, quantizer.zero, quantizer.bits, first)
        if isinstance(quantizer, PerToken):
            # no more than the whole range, with a gradient that leads back
            scale = scale - (scale.detach() - 1).clamp_min(0)
        if isinstance(quantizer, TokenQuantizer):
            step, zero = token_grid(x.detach(), quantizer.bits, quantizer.axis)
            return uniform(x, scale * step, zero, quantizer.bits, first)
        if isinstance(quantizer, TokenLogQuantizer):
            return _of_sizes(quantizer, x, scale, first)
        assert isinstance(quantizer, LogQuantizer), "only these kinds have a trained scale"
        levels = (quantizer.levels + quantizer.offset) / quantizer.scale
        per_octave = quantizer.denominator / quantizer.step
        moved = {"shift": float(quantizer.shift), "offset": float(quantizer.offset)}
        return logarithmic(x, scale, levels, per_octave, first=first, **moved)

    def fitted(self) -> Quantizer:
        """The quantizer with the trained scale."""
        whole, body = self.whole, self._fitted_body()
        if not isinstance(whole, PrefixQuantizer):
            return body
        return PrefixQuantizer(body.bits, whole.prefix, body, count=whole.count, axis=whole.axis)

    def _fitted_body(self) -> Quantizer:
        quantizer = self.original
        if self.log_scale is None:
            return quantizer
        scale = self.log_scale.detach().exp()
        if isinstance(quantizer, UniformQuantizer):
            return UniformQuantizer(quantizer.bits, scale, quantizer.zero)
        if isinstance(quantizer, TokenQuantizer):
            return TokenQuantizer(quantizer.bits, scale.clamp(max=1), **quantizer.options())
        if isinstance(quantizer, TokenLogQuantizer):
            clip, options = scale.clamp(max=1), quantizer.options()
            return TokenLogQuantizer(quantizer.bits, clip, quantizer.shift, **options)
        assert isinstance(quantizer, LogQuantizer), "only these kinds have a trained scale"
        return LogQuantizer(
            quantizer.bits, scale, quantizer.shift, quantizer.offset, **quantizer.options()
        )


def _of_sizes(quantizer: TokenLogQuantizer, x: Tensor, clip: Tensor, first: First | None) -> Tensor:
    """X on powers of a base, each token in parts of its largest value."""
    shift = float(quantizer.shift)
    size = token_size(x.detach(), quantizer.shift, quantizer.axis)
    if first is not None:
        first = First((first.values + shift) / first.of(size), first.axis)
    powers = quantizer.powers(torch.ones(1))
    per_octave = powers.denominator / powers.step
    share = (x + shift) / size if shift else x / size
    value = logarithmic(share, clip, powers.levels, per_octave, first=first) * size
    return value - shift if shift else value


def _straight(quantizer: Quantizer, x: Tensor, first: First | None) -> Tensor:
    """X rounded by a quantizer as it is, with the gradient of x."""
    rounded: Tensor = quantizer(x.detach())
    if first is not None:
        first.of(rounded).copy_(first.values)
    return x + (rounded - x.detach())


def _trainable(quantizer: Quantizer | None) -> TrainableQuantizer | None:
    return None if quantizer is None else TrainableQuantizer(quantizer)


def _fitted(quantizer: TrainableQuantizer | None) -> Quantizer | None:
    return None if quantizer is None else quantizer.fitted()


def _applied(quantizer: TrainableQuantizer | None, x: Tensor) -> Tensor:
    return x if quantizer is None else quantizer(x)


def _with_offset(quantizer: LogQuantizer, offset: Tensor) -> LogQuantizer:
    return LogQuantizer(
        quantizer.bits, quantizer.scale, quantizer.shift, offset, **quantizer.options()
    )


class TrainableLayer(nn.Module):
    """A quantized linear layer or convolution with trained codes, weight scales and bias.

    A shift that the bias has absorbed is taken out of it again while the codes change.
    """

    def __init__(self, fit: LayerFit, original: nn.Module, rounding: Rounding) -> None:
        super().__init__()
        assert isinstance(original, nn.Linear | nn.Conv2d), "discovery names linear layers only"
        self.fit, self.shape, self.rounding = fit, tuple(original.weight.shape), rounding
        # in a tuple, so that it is no part of the state
        self.like = (copy.deepcopy(original).to("meta"),)
        self.absorbed = False
        bias, inputs = fit.bias, fit.input_quantizer
        if isinstance(inputs, LogQuantizer) and not torch.equal(inputs.offset, inputs.shift):
            self.absorbed = True
            bias = absorb_shift(bias, fit.weight, inputs.offset - inputs.shift)
            inputs = _with_offset(inputs, inputs.shift)
        self.bias = nn.Parameter(bias.clone())
        self.input_quantizer = _trainable(inputs)
        self.output_quantizer = _trainable(fit.output_quantizer)
        self.latent: nn.Parameter | None = None
        self.log_scale: nn.Parameter | None = None
        self.register_buffer("floor", None)
        self.floor: Tensor | None
        quantizer = fit.weight_quantizer
        if isinstance(quantizer, UniformQuantizer):
            weight = original.weight.detach().flatten(1)
            if fit.fold is not None:
                weight, _ = fit.fold.of_linear(weight, bias)
            position = weight / quantizer.scale + quantizer.zero
            if rounding == "free":
                self.latent = nn.Parameter(_in_cell(position, fit.codes, REACH))
                self.log_scale = nn.Parameter(quantizer.scale.log())
            else:
                position = _in_cell(position, fit.codes, 0.49)
                self.floor = position.clamp(0, quantizer.n_codes - 1).floor()
                part = (position - self.floor).clamp(0.01, 0.99)
                self.latent = nn.Parameter(torch.logit((part - LOW) / (HIGH - LOW)))

    def up(self) -> Tensor:
        """How far each weight is rounded up, 0..1 ("nearest two" only)."""
        assert self.latent is not None, "only trained codes are rounded"
        return (self.latent.sigmoid() * (HIGH - LOW) + LOW).clamp(0, 1)

    def weight(self) -> Tensor:
        """The decoded weight (outputs, inputs), differentiable."""
        quantizer = self.fit.weight_quantizer
        if self.latent is None:
            return self.fit.weight
        assert isinstance(quantizer, UniformQuantizer), "only these codes are trained"
        if self.floor is not None:
            codes = (self.floor + self.up()).clamp(0, quantizer.n_codes - 1)
            return (codes - quantizer.zero) * quantizer.scale
        assert self.log_scale is not None, "free codes have a trained scale"
        return of_codes(self.latent, self.log_scale.exp(), quantizer.zero, quantizer.bits)

    def forward(self, x: Tensor) -> Tensor:
        """The layer on the quantized input."""
        inputs = _applied(self.input_quantizer, x)
        weight = self.weight().view(self.shape)
        (conv,) = self.like
        if isinstance(conv, nn.Conv2d):
            stride, padding, dilation = conv.stride, conv.padding, conv.dilation
            output = F.conv2d(inputs, weight, self.bias, stride, padding, dilation)
        else:
            output = F.linear(inputs, weight, self.bias)
        return _applied(self.output_quantizer, output)

    @torch.no_grad()
    def fitted(self) -> LayerFit:
        """The fit with the trained codes, scales and bias; the fold is in the norm already."""
        fit, quantizer, codes = self.fit, self.fit.weight_quantizer, self.fit.codes
        if self.latent is not None:
            assert isinstance(quantizer, UniformQuantizer), "only these codes are trained"
            position = self.latent if self.floor is None else self.floor + (self.up() >= 0.5)
            codes = compact(position.round().clamp(0, quantizer.n_codes - 1), quantizer.bits)
            if self.log_scale is not None:
                scale = self.log_scale.exp()
                quantizer = UniformQuantizer(quantizer.bits, scale, quantizer.zero)
        bias = self.bias.detach().clone()
        inputs, outputs = _fitted(self.input_quantizer), _fitted(self.output_quantizer)
        if self.absorbed:
            assert isinstance(inputs, LogQuantizer), "only its shift is absorbed"
            bias = absorb_shift(bias, quantizer.decode(codes), inputs.shift)
            inputs = _with_offset(inputs, torch.zeros_like(inputs.shift))
        return LayerFit(
            fit.spec, fit.bits, codes, bias, quantizer, inputs, output_quantizer=outputs
        )


def _in_cell(position: Tensor, codes: Tensor, reach: float) -> Tensor:
    """Positions on the grid, moved as little as needed to be this near to these codes."""
    code = codes.to(position)
    return torch.minimum(torch.maximum(position, code - reach), code + reach)


class TrainableMatMul(nn.Module):
    """An attention product with trained operand scales."""

    def __init__(self, fit: MatmulFit) -> None:
        super().__init__()
        self.spec = fit.spec
        self.left, self.right = _trainable(fit.left), _trainable(fit.right)
        self.output = _trainable(fit.output)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """A @ b with operands and product quantized where there is a quantizer."""
        return _applied(self.output, _applied(self.left, a) @ _applied(self.right, b))

    def fitted(self) -> MatmulFit:
        """The fit with the trained scales."""
        parts = (_fitted(part) for part in (self.left, self.right, self.output))
        return MatmulFit(self.spec, *parts)


class TrainableSum(nn.Module):
    """A residual sum with a trained scale."""

    def __init__(self, fit: SumFit) -> None:
        super().__init__()
        self.spec, self.quantizer = fit.spec, TrainableQuantizer(fit.quantizer)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """A + b, quantized."""
        total: Tensor = self.quantizer(a + b)
        return total

    def fitted(self) -> SumFit:
        """The fit with the trained scale."""
        return SumFit(self.spec, self.quantizer.fitted())


def trainable(
    model: nn.Module,
    layers: Iterable[LayerFit],
    sites: Iterable[SiteFit],
    rounding: Rounding = "free",
) -> nn.Module:
    """A copy of the float model, in its explicit form, with trainable quantized sites."""
    opened = copy.deepcopy(model)
    for fit in layers:
        original = opened.get_submodule(fit.spec.name)
        install_(opened, fit)  # folds the norm
        replace_module(opened, fit.spec.name, TrainableLayer(fit, original, rounding))
    for site in sites:
        kind = TrainableMatMul(site) if isinstance(site, MatmulFit) else TrainableSum(site)
        replace_module(opened, site.spec.name, kind)
    return opened.eval()


def fitted(model: nn.Module) -> nn.Module:
    """A copy of a trained model with its sites quantized for good."""
    frozen = copy.deepcopy(model)
    for name, module in list(frozen.named_modules()):
        if isinstance(module, TrainableLayer):
            replace_module(frozen, name, quantized_layer(module.fitted(), module.like[0]))
        elif isinstance(module, TrainableMatMul | TrainableSum):
            replace_module(frozen, name, quantized_site(module.fitted()))
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    return frozen.eval()


def quantizers(module: nn.Module) -> Iterator[TrainableQuantizer]:
    """The activation quantizers inside a module."""
    return (part for part in module.modules() if isinstance(part, TrainableQuantizer))


def layers_of(module: nn.Module) -> Iterator[TrainableLayer]:
    """The quantized layers inside a module."""
    return (part for part in module.modules() if isinstance(part, TrainableLayer))

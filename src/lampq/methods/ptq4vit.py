"""PTQ4ViT (Yuan et al., ECCV 2022): twin grids, and scales searched by a gradient-weighted error.

Weights are symmetric with one scale per tensor (qkv: one for each of its three parts; patch
embedding: one per channel), inputs and operands symmetric with one scale. The softmax output and
the input behind GELU get twin uniform quantizers. A scale is the best of 100 shares of that of the
largest magnitude, by the sum of (g (y - y'))^2 over the output y, with g the gradient at y.

Deviations: the gradient is that of the log-likelihood of labels drawn from the model, which makes
g^2 the diagonal of the Fisher matrix; the published one is that of a divergence which is zero. The
first search of a weight or left operand has the other side in float, not at its full range. The
error is evaluated on the tokens with the largest gradients, which make most of the sum, and on some
of the attention maps. A twin grid is taken by each value, not both added. The input behind GELU may
reach lower than GELU does. At one bit, symmetric levels are plus and minus half a scale. Statistics
without gradients are searched by the plain squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.methods.search import spread
from lampq.quant.base import Quantizer, compact
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.quant.twin import GELU_MINIMUM, TwinGeluQuantizer, TwinSoftmaxQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, MatmulSpec, Profile

SHARES = tuple(0.01 + i * 1.19 / 100 for i in range(100))
SPLITS = tuple(2.0**-i for i in range(20))
TINY = 1e-12
Keep = Callable[[Tensor], Tensor]


class LayerErrors(Protocol):
    """Errors by output, (outputs,), or of all outputs together, (1,)."""

    def __call__(self, weight: Tensor, quantizer: Quantizer | None) -> Tensor:
        """The errors with this weight and input quantizer; None stands for float."""
        ...


class ProductError(Protocol):
    """Error of a product, (1,)."""

    def __call__(self, left: Quantizer | None, right: Quantizer | None) -> Tensor:
        """The error with these quantizers of the operands; None stands for float."""
        ...


def shares(count: int) -> tuple[float, ...]:
    """Evenly many of the published candidates."""
    step = max(1, len(SHARES) // count)
    return SHARES[step - 1 :: step]


def symmetric(bits: int, scale: Tensor) -> UniformQuantizer:
    """The grid scale * {-2**(bits - 1), ..., 2**(bits - 1) - 1}; at one bit half a scale up."""
    zero = 2 ** (bits - 1) if bits > 1 else 0.5
    return UniformQuantizer(bits, scale, torch.full_like(scale, zero))


def full_scale(largest: Tensor, bits: int) -> Tensor:
    """The scale at which the largest magnitude is just in range."""
    full: Tensor = largest / (2 ** (bits - 1) - 0.5)
    return full.clamp_min(TINY)


def best_of(candidates: Iterable[Quantizer], error: Callable[[Quantizer], Tensor]) -> Quantizer:
    """The quantizer of least error, summed if it has parts."""
    return min(candidates, key=lambda quantizer: float(error(quantizer).sum()))


def input_candidates(
    role: LayerRole, x: Tensor, bits: int, count: int, profile: Profile
) -> list[Quantizer]:
    """Quantizers of a layer's input; a twin one behind GELU, unless integer kernels are wanted."""
    if role is not LayerRole.FC2 or profile == "speed":
        return operand_candidates(x, bits, count)
    least = (-x.min()).clamp_min(GELU_MINIMUM)
    full = (x.max() / max(2 ** (bits - 1) - 1, 1)).clamp_min(TINY)
    return [TwinGeluQuantizer.reaching(bits, least, share * full) for share in shares(count)]


def operand_candidates(x: Tensor, bits: int, count: int) -> list[Quantizer]:
    """Symmetric quantizers of an activation."""
    full = full_scale(x.abs().max(), bits)
    return [symmetric(bits, share * full) for share in shares(count)]


def split_candidates(x: Tensor, bits: int) -> list[Quantizer]:
    """Twin quantizers of a softmax output."""
    return [TwinSoftmaxQuantizer.splitting(bits, x.new_tensor(split)) for split in SPLITS]


def searched_weight(
    layer: LinearView, bits: int, count: int, errors: Callable[[Tensor], Tensor]
) -> UniformQuantizer:
    """The weight grid of least error; its groups are searched apart where the errors are apart."""
    weight, groups = layer.weight, 1
    if layer.spec.role is LayerRole.PATCH_EMBED:
        groups = len(weight)
    elif layer.spec.role is LayerRole.QKV and len(weight) % 3 == 0:
        groups = 3
    full = full_scale(weight.abs().reshape(groups, -1).amax(dim=1), bits)
    scale = full.clone()

    def grid(scale: Tensor) -> UniformQuantizer:
        rows = 1 if groups == 1 else len(weight) // groups
        return symmetric(bits, scale.repeat_interleave(rows)[:, None])

    tried = torch.tensor(shares(count)).to(weight)
    if len(errors(grid(scale)(weight))) == len(weight):
        table = torch.stack([errors(grid(share * full)(weight)) for share in tried])
        best = table.reshape(len(tried), groups, -1).sum(dim=2).argmin(dim=0)
        return grid(tried[best] * full)
    for group in range(groups):
        trials = scale.repeat(len(tried), 1)
        trials[:, group] = tried * full[group]
        scale = min(trials, key=lambda trial: float(errors(grid(trial)(weight))))
    return grid(scale)


def fit_layer(
    layer: LinearView,
    bits: LayerBits,
    inputs: Tensor,
    errors: LayerErrors,
    *,
    candidates: int,
    rounds: int,
    profile: Profile,
) -> LayerFit:
    """Weight and input grids in turn; the input of a patch embedding stays in float."""
    role = layer.spec.role
    tried = input_candidates(role, inputs, bits.activation, candidates, profile)
    quantizer: Quantizer | None = None
    for _ in range(rounds):
        with_input = partial(errors, quantizer=quantizer)
        grid = searched_weight(layer, bits.weight, candidates, with_input)
        if role is LayerRole.PATCH_EMBED:
            break
        quantizer = best_of(tried, partial(errors, grid(layer.weight)))
    codes = compact(grid.encode(layer.weight), bits.weight)
    return LayerFit(layer.spec, bits, codes, layer.bias, grid, quantizer)


def fit_product(
    site: MatmulSpec,
    lefts: list[Quantizer],
    rights: list[Quantizer],
    error: ProductError,
    rounds: int,
) -> MatmulFit:
    """Left and right operand in turn, the best of their candidates."""
    right: Quantizer | None = None
    for _ in range(rounds):
        left = best_of(lefts, partial(error, right=right))
        right = best_of(rights, partial(error, left))
    assert right is not None, "there is at least one round"
    return MatmulFit(site, left, right)


def importance(gradients: Tensor | None, like: Tensor) -> Tensor:
    """Weights of the errors with a mean square of one; one each where nothing is known."""
    power = None if gradients is None else gradients.double().square().mean()
    if gradients is None or power is None or float(power) == 0:
        return torch.ones_like(like)
    return (gradients.double() / power.sqrt()).to(like.dtype)


def influential(stats: LayerStats, count: int) -> tuple[Tensor, Tensor | None]:
    """Inputs and gradients of the tokens with the largest gradients, in their order."""
    if stats.gradients is None or not bool(stats.gradients.any()):
        return spread(stats.inputs, count), None
    power = stats.gradients.square().sum(dim=1)
    index = power.topk(min(count, len(power))).indices.sort().values
    return stats.inputs[index], stats.gradients[index]


def output_errors(
    layer: LinearView, stats: LayerStats, tokens: int, kept: Keep | None = None
) -> LayerErrors:
    """Weighted squared errors of the layer's own output, summed over some tokens.

    ``kept`` is what of the errors counts.
    """
    inputs, gradients = influential(stats, tokens)
    exact = inputs @ layer.weight.T
    weights = importance(gradients, exact)

    # while weights are searched the input stays the same
    @lru_cache(maxsize=1)
    def quantized(quantizer: Quantizer | None) -> Tensor:
        return inputs if quantizer is None else quantizer(inputs)

    def errors(weight: Tensor, quantizer: Quantizer | None) -> Tensor:
        error = (quantized(quantizer) @ weight.T).sub_(exact)
        error = error if kept is None else kept(error)
        return error.mul_(weights).square_().sum(dim=0)

    return errors


def product_error(stats: MatmulStats, maps: int, kept: Keep | None = None) -> ProductError:
    """Weighted squared error of the product itself, summed over some attention maps."""
    a, b = spread(stats.left, maps), spread(stats.right, maps)
    exact = a @ b
    weights = importance(
        None if stats.gradients is None else spread(stats.gradients, maps), like=exact
    )

    # while one operand is searched the other stays the same
    @lru_cache(maxsize=1)
    def of_left(left: Quantizer | None) -> Tensor:
        return a if left is None else left(a)

    @lru_cache(maxsize=1)
    def of_right(right: Quantizer | None) -> Tensor:
        return b if right is None else right(b)

    def error(left: Quantizer | None, right: Quantizer | None) -> Tensor:
        difference = (of_left(left) @ of_right(right)).sub_(exact)
        difference = difference if kept is None else kept(difference)
        return difference.mul_(weights).square_().sum()

    return error


@dataclass(frozen=True, slots=True)
class PTQ4ViT:
    """Twin uniform quantizers and the gradient-weighted search.

    ``candidates`` scales (at most 100) are scored in each of ``rounds`` rounds of weight and input,
    on at most ``tokens`` tokens or ``maps`` attention maps. Rounds after the first change little;
    the published number is three. ``profile``: "speed" has no twin grid behind GELU.
    """

    name: ClassVar[str] = "ptq4vit"
    wants_gradients: ClassVar[bool] = True
    candidates: int = 100
    rounds: int = 2
    tokens: int = 512
    maps: int = 8
    profile: Profile = "accuracy"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width."""
        errors = output_errors(layer, stats, self.tokens)
        return fit_layer(
            layer,
            bits,
            stats.inputs,
            errors,
            candidates=self.candidates,
            rounds=self.rounds,
            profile=self.profile,
        )

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """Operands with one scale; a twin quantizer for the softmax output."""
        lefts = (
            split_candidates(stats.left, left_bits)
            if site.kind == "av"
            else operand_candidates(stats.left, left_bits, self.candidates)
        )
        rights = operand_candidates(stats.right, right_bits, self.candidates)
        return fit_product(site, lefts, rights, product_error(stats, self.maps), self.rounds)

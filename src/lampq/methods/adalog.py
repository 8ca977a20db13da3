"""AdaLog (Wu et al., ECCV 2024), calibrate stage: scales searched on the output of each layer.

Weights are uniform per output channel; inputs behind a LayerNorm are fitted per channel and folded
into the norm; the input behind GELU and the softmax output get a logarithmic quantizer with a
searched base. Every layer is fitted on float inputs, so a fit depends on its own width only.

The errors are evaluated in Gram form: for a row w and quantized inputs X, the output error is a
quadratic form in w, so its cost does not depend on the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.methods.compensate import compensated_codes
from lampq.methods.search import (
    EXHAUSTIVE,
    Error,
    Grid,
    SearchDepth,
    progressive_search,
    uniform_grid,
)
from lampq.quant.fold import NormFold, absorb_shift
from lampq.quant.log import DENOMINATOR, LogQuantizer, ZeroCode
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.quant.uniform import UniformQuantizer, uniform_round
from lampq.types import LayerBits, LayerRole, MatmulSpec

GELU_MINIMUM = 0.16997124254703522
STEPS = range(10, 138)
FOLD_POWERS = (1.0, 0.75, 0.5, 0.25)
# enough to tell folds apart
COARSE = SearchDepth(candidates=32, steps=1)


def _decoded(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return uniform_round(x, scale, zero, bits).sub_(zero).mul_(scale)


def _log_decoded(logs: Tensor, scale: Tensor, step: Tensor, bits: int, method: AdaLog) -> Tensor:
    """Powers nearest to 2**logs, by the smooth formula that the table rounds."""
    codes = (scale.log2() - logs).mul_(DENOMINATOR / step).round_().clamp_min_(0)
    beyond = codes >= 2**bits - (method.zero_code == "reserved")
    return codes.mul_(-step / DENOMINATOR).exp2_().mul_(scale).masked_fill_(beyond, 0.0)


def _spread(tensor: Tensor, count: int) -> Tensor:
    """At most ``count`` rows, evenly spread."""
    if len(tensor) <= count:
        return tensor
    return tensor[torch.linspace(0, len(tensor) - 1, count).long()]


@dataclass(frozen=True, slots=True)
class AdaLog:
    """The calibrate stage of AdaLog.

    ``search``: "exhaustive" is the published depth, three rounds of six full steps; "fast" screens
    the candidates by a cheap error first and does one round.
    ``tokens`` and ``maps`` bound the inputs and attention maps that score activation scales.
    ``onebit``: at one bit, levels {0, scale} ("adalog") or two free levels ("affine").
    ``compensation``: "none" rounds to nearest as published; "gptq" lets the weights that are not
    yet rounded absorb the error of those that are, and of the input (GPTQ on the quantized input).
    ``fold``: how far the scales of the channels behind a norm are evened out. "full" makes them all
    equal, as published, which leaves their differences to the weight; "searched" takes the power of
    the scales, out of FOLD_POWERS, with the least output error.
    ``error``: "plain" sums the squared output error over tokens, as published. Where a few tokens
    are enormous they alone make that sum, and everything else may be rounded to zero. "relative"
    also looks at the error of each token in proportion to its size: weights are fitted to that,
    inputs to the geometric mean of both, so that large and ordinary tokens count alike.
    """

    name: ClassVar[str] = "adalog"
    search: Literal["fast", "exhaustive"] = "fast"
    tokens: int = 768
    maps: int = 8
    zero_code: ZeroCode = "extra"
    onebit: Literal["adalog", "affine"] = "adalog"
    compensation: Literal["none", "gptq"] = "none"
    fold: Literal["full", "searched"] = "full"
    error: Literal["plain", "relative"] = "plain"
    coarse: bool = field(default=False, repr=False)

    @property
    def depth(self) -> SearchDepth:
        """How much of the candidate space is scored."""
        if self.coarse:
            return COARSE
        return EXHAUSTIVE if self.search == "exhaustive" else SearchDepth()

    @property
    def rounds(self) -> int:
        """How often the search alternates between weight and input."""
        return 3 if self.search == "exhaustive" else 1

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width."""
        fold = None
        weight, bias, inputs = layer.weight, layer.bias, stats.inputs
        if layer.spec.norm is not None:
            fold = self._best_fold(layer, bits, inputs)
            weight, bias = fold.of_linear(weight, bias)
            inputs = fold.of_inputs(inputs)
        problem = _LayerProblem(self, weight, inputs, bits, bias)
        if layer.spec.role is LayerRole.PATCH_EMBED:
            problem.search_weight()
        elif layer.spec.role is LayerRole.FC2:
            problem.search_log_input()
            for _ in range(self.rounds):
                problem.search_weight()
                problem.search_log_input()
        else:
            problem.search_input(on_output=False)
            for _ in range(self.rounds):
                problem.search_weight()
                problem.search_input(on_output=True)
        return problem.finish(layer, bias, fold)

    def _best_fold(self, layer: LinearView, bits: LayerBits, inputs: Tensor) -> NormFold:
        """The fold of least output error, by a coarse search of weight and input."""
        scale, zero = self._channel_scales(inputs, bits.activation)
        folds = [
            NormFold.partly(scale, zero, power, 2**bits.activation - 1)
            for power in (FOLD_POWERS if self.fold == "searched" else (1.0,))
        ]
        if len(folds) == 1:
            return folds[0]
        few = _spread(inputs, self.tokens)
        coarse = replace(self, coarse=True)

        def error(fold: NormFold) -> float:
            weight, bias = fold.of_linear(layer.weight, layer.bias)
            problem = _LayerProblem(coarse, weight, fold.of_inputs(few), bits, bias)
            problem.search_input(on_output=False)
            return problem.error()

        return min(folds, key=error)

    def _channel_scales(self, inputs: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point fitted to every channel on its own."""
        rows = _spread(inputs, self.tokens).T.contiguous()  # (channels, tokens)
        grid = self.input_grid(rows, bits)

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            guess = _decoded(rows, scale[..., None], zero[..., None], bits)
            return guess.sub_(rows).square_().sum(dim=-1)

        return progressive_search(grid, error, self.depth, elements=rows.numel())

    def input_grid(self, rows: Tensor, bits: int) -> Grid:
        """Candidates for an activation, one row per group."""
        return uniform_grid(
            rows,
            bits,
            candidates=self.depth.candidates,
            max_zeros=2**bits,
            affine=self.onebit == "affine",
        )

    def weight_grid(self, rows: Tensor, bits: int) -> Grid:
        """Candidates for a weight or a matmul operand, one row per group."""
        return uniform_grid(
            rows,
            bits,
            candidates=self.depth.candidates,
            max_zeros=max(1, 2 ** (bits - 1)),
            affine=self.onebit == "affine",
        )

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """Operand quantizers per head; the softmax output gets a searched logarithmic base."""
        left, right = _spread(stats.left, self.maps), _spread(stats.right, self.maps)
        exact = left @ right
        right_hat = right
        fitted_left: UniformQuantizer | LogQuantizer
        for _ in range(self.rounds):
            if site.kind == "av":
                fitted_left = self._softmax(left, right_hat, exact, left_bits)
            else:
                fitted_left = self._operand(left, left_bits, exact, other=right_hat, first=True)
            left_hat = fitted_left(left)
            fitted_right = self._operand(right, right_bits, exact, other=left_hat, first=False)
            right_hat = fitted_right(right)
        return MatmulFit(site, fitted_left, fitted_right)

    def _operand(
        self, operand: Tensor, bits: int, exact: Tensor, *, other: Tensor, first: bool
    ) -> UniformQuantizer:
        """A uniform quantizer per head, by the error of the product with the other operand."""

        def guess(scale: Tensor, zero: Tensor) -> Tensor:  # (candidates, maps, heads, ., .)
            return _decoded(operand, _of_heads(scale), _of_heads(zero), bits)

        def cheap(scale: Tensor, zero: Tensor) -> Tensor:
            return guess(scale, zero).sub_(operand).square_().sum(dim=(1, 3, 4))

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            one = guess(scale, zero)
            product = one @ other if first else other @ one
            return product.sub_(exact).square_().sum(dim=(1, 3, 4))

        grid = self.weight_grid(operand.transpose(0, 1).flatten(1), bits)
        scale, zero = progressive_search(
            grid, error, self.depth, cheap=cheap, elements=operand.numel()
        )
        return UniformQuantizer(bits, scale[:, None, None], zero[:, None, None])

    def _softmax(self, left: Tensor, right: Tensor, exact: Tensor, bits: int) -> LogQuantizer:
        """A logarithmic quantizer with scale one and the base of least product error.

        The error of the probabilities alone is a poor guide: it is made by the few large ones,
        while the product sums up the many small ones that a narrow base takes for zero. So bases
        from the whole range are scored by the product too.
        """
        one = left.new_ones(1)
        logs = left.clamp_min(1e-15).log2_()

        def cheap(step: int) -> float:
            guess = _log_decoded(logs, one, one * step, bits, self)
            return float(guess.sub_(left).square_().sum())

        def error(step: int) -> float:
            return float((self.log(bits, one, step)(left) @ right - exact).square_().sum())

        depth = self.depth
        tried = set(STEPS[:: depth.stride])
        if depth.screen:
            tried |= set(sorted(STEPS, key=cheap)[: depth.screen])
        best = min(sorted(tried), key=error)
        near = [step for step in STEPS if abs(step - best) < depth.stride]
        return self.log(bits, one, min(near, key=error))

    def log(self, bits: int, scale: Tensor, step: int, shift: Tensor | None = None) -> LogQuantizer:
        """A logarithmic quantizer with this method's zero code."""
        shift = torch.zeros_like(scale) if shift is None else shift
        return LogQuantizer(bits, scale, shift, shift, step=step, zero_code=self.zero_code)


def _of_heads(values: Tensor) -> Tensor:
    """Values (candidates, heads) against operands (maps, heads, rows, columns)."""
    return values[:, None, :, None, None]


class _LayerProblem:
    """The alternating search for one layer: weight grid given the input's, and back."""

    def __init__(
        self,
        method: AdaLog,
        weight: Tensor,
        inputs: Tensor,
        bits: LayerBits,
        bias: Tensor | None = None,
    ) -> None:
        self.method, self.bits = method, bits
        self.weight, self.inputs = weight, inputs
        self.sampled = _spread(inputs, method.tokens)
        self.shares = torch.ones(len(inputs)).to(inputs)
        if method.error == "relative":
            size = (inputs @ weight.T + (0 if bias is None else bias)).square().sum(dim=1)
            inverse = 1 / (size + size.median()).clamp_min(1e-30)
            self.shares = inverse / inverse.mean()
        self.input_quantizer: UniformQuantizer | LogQuantizer | None = None
        self.weight_quantizer = self._nearest_weight()

    def _nearest_weight(self) -> UniformQuantizer:
        """The grid of least weighted squared error of the weight itself."""
        power = self.shares @ self.inputs.square() / len(self.inputs)

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            return self._weight_error(scale, zero).square_() @ power

        return self._searched_weight(error, None)

    def _searched_weight(self, error: Error, cheap: Error | None) -> UniformQuantizer:
        grid = self.method.weight_grid(self.weight, self.bits.weight)
        scale, zero = progressive_search(
            grid, error, self.method.depth, cheap=cheap, elements=self.weight.numel()
        )
        return UniformQuantizer(self.bits.weight, scale[:, None], zero[:, None])

    def _weight_error(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Errors of the weight (candidates, outputs, inputs)."""
        decoded = _decoded(self.weight, scale[..., None], zero[..., None], self.bits.weight)
        return decoded.sub_(self.weight)

    def _quantized_inputs(self) -> Tensor:
        return self.inputs if self.input_quantizer is None else self.input_quantizer(self.inputs)

    def _of_tokens(self, squared: Tensor) -> Tensor:
        """One error of the squared errors (..., tokens) of the sampled tokens or some of them."""
        plain = squared.sum(dim=-1)
        if self.method.error == "plain":
            return plain
        shares = _spread(_spread(self.shares, self.method.tokens), squared.shape[-1])
        return (plain * (squared @ shares)).sqrt()

    def error(self) -> float:
        """Error of the output on the sampled tokens."""
        quantized = self.input_quantizer(self.sampled) if self.input_quantizer else self.sampled
        exact = self.sampled @ self.weight.T
        decoded = self.weight_quantizer(self.weight)
        return float(self._of_tokens((quantized @ decoded.T - exact).square().sum(dim=-1)))

    def gram(self) -> tuple[Tensor, Tensor]:
        """Gram matrix of the quantized inputs, and their product with the output error so far.

        With e = quantized weight - weight, the squared output error of a row is
        e G e + 2 e c + constant.
        """
        quantized = self._quantized_inputs()
        weighed = (quantized * self.shares[:, None]).T
        gram = weighed @ quantized
        cross = weighed @ ((quantized - self.inputs) @ self.weight.T)  # (inputs, outputs)
        return gram, cross.T.contiguous()

    def search_weight(self) -> None:
        """Weight scales of least output error with the input quantizer as it is."""
        gram, cross = self.gram()
        power = gram.diagonal().contiguous()

        def cheap(scale: Tensor, zero: Tensor) -> Tensor:
            e = self._weight_error(scale, zero)
            return (e * power).add_(2 * cross).mul_(e).sum(dim=-1)

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            e = self._weight_error(scale, zero)
            return (e @ gram).add_(2 * cross).mul_(e).sum(dim=-1)

        self.weight_quantizer = self._searched_weight(error, cheap)

    def _input_errors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Decoded weight, its squared column norms, and the exact output of the sampled tokens."""
        decoded = self.weight_quantizer(self.weight)
        return decoded, decoded.square().sum(dim=0), self.sampled @ self.weight.T

    def search_input(self, *, on_output: bool) -> None:
        """Input scale and zero point of least output error, or of least error of the input."""
        x, bits = self.sampled, self.bits.activation
        decoded, power, exact = self._input_errors()
        if not on_output:
            power = torch.ones_like(power)

        def cheap(scale: Tensor, zero: Tensor) -> Tensor:
            guess = _decoded(x, scale[..., None], zero[..., None], bits)
            return self._of_tokens(guess.sub_(x).square_() @ power)[:, None]

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            output = _decoded(x, scale[..., None], zero[..., None], bits) @ decoded.T
            return self._of_tokens(output.sub_(exact).square_().sum(dim=2))[:, None]

        grid = self.method.input_grid(x.reshape(1, -1), bits)
        true = error if on_output else cheap
        scale, zero = progressive_search(
            grid, true, self.method.depth, cheap=cheap, elements=x.numel()
        )
        self.input_quantizer = UniformQuantizer(bits, scale[0], zero[0])

    def search_log_input(self) -> None:
        """Scale and base of the shifted logarithmic quantizer of least output error."""
        method, bits = self.method, self.bits.activation
        shift = torch.clamp(-self.inputs.min(), min=GELU_MINIMUM)
        x = self.sampled + shift
        logs = x.clamp_min(1e-15).log2()
        decoded, power, exact = self._input_errors()
        exact = exact + shift * decoded.sum(dim=1)
        few, few_logs = _spread(x, method.tokens // 4), _spread(logs, method.tokens // 4)

        def cheap(scale: Tensor, step: Tensor) -> Tensor:
            guess = _log_decoded(few_logs, scale[..., None], step[..., None], bits, method)
            return self._of_tokens(guess.sub_(few).square_() @ power)[:, None]

        def error(scale: Tensor, step: Tensor) -> Tensor:
            pairs = zip(scale, step, strict=True)
            guesses = torch.stack([method.log(bits, s, int(q))(x) for s, q in pairs])
            squared = (guesses @ decoded.T).sub_(exact).square_().sum(dim=2)
            return self._of_tokens(squared)[:, None]

        grid = self._log_grid(x, shift, cheap)
        scale, step = progressive_search(grid, error, method.depth, cheap=cheap, elements=x.numel())
        self.input_quantizer = method.log(bits, scale, int(step), shift.reshape(1))

    def _log_grid(self, x: Tensor, shift: Tensor, cheap: Error) -> Grid:
        """The eight best bases at the scale so far, with every scale of a ladder."""
        positive = x[x > shift] if bool((x > shift).any()) else x.flatten()
        high = positive.max()
        near = positive.kthvalue(max(1, round(0.9 * positive.numel()))).values
        ladder = torch.linspace(0, 1, 16).to(x) * (high - near) + near
        spacing = ((high - near) / 15).clamp_min(1e-8).reshape(1)
        start = ladder[-2] if self.input_quantizer is None else self.input_quantizer.scale
        steps = torch.tensor(list(STEPS), dtype=x.dtype)[:, None]
        errors = cheap(start.reshape(1, 1).expand(steps.shape), steps)
        best = steps[errors[:, 0].topk(8, largest=False).indices, 0]
        scales = torch.cat([ladder, start.reshape(1)])
        return Grid(
            scale=scales.repeat(len(best))[:, None],
            zero=best.repeat_interleave(len(scales))[:, None],
            spacing=spacing,
        )

    def finish(self, layer: LinearView, bias: Tensor, fold: NormFold | None) -> LayerFit:
        """The fit, with the shift of a logarithmic input moved into the bias."""
        codes, bias = self._codes(bias)
        quantizer = self.input_quantizer
        if isinstance(quantizer, LogQuantizer):
            decoded = self.weight_quantizer.decode(codes)
            bias = absorb_shift(bias, decoded, quantizer.shift)
            quantizer = LogQuantizer(
                quantizer.bits,
                quantizer.scale,
                quantizer.shift,
                torch.zeros_like(quantizer.shift),
                **quantizer.options(),
            )
        return LayerFit(layer.spec, self.bits, codes, bias, self.weight_quantizer, quantizer, fold)

    def _codes(self, bias: Tensor) -> tuple[Tensor, Tensor]:
        if self.method.compensation == "none":
            return self.weight_quantizer.encode(self.weight).to(torch.uint8), bias
        return compensated_codes(
            self.weight, bias, self.inputs, self._quantized_inputs(), self.weight_quantizer
        )

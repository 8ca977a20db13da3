"""AdaLog (Wu et al., ECCV 2024), calibrate stage: scales searched on the output of each layer.

Weights are uniform per output channel; inputs behind a LayerNorm are fitted per channel and folded
into the norm; the input behind GELU and the softmax output get a logarithmic quantizer with a
searched base. Every layer is fitted on float inputs, so a fit depends on its own width only.

The errors are evaluated in Gram form: for a row w and quantized inputs X, the output error is a
quadratic form in w, so its cost does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.adalog_layer import STEPS, LayerSearch, without
from lampq.methods.base import LinearView
from lampq.methods.compensate import DAMPING
from lampq.methods.search import (
    EXHAUSTIVE,
    Error,
    Grid,
    SearchDepth,
    clip_grid,
    log_decoded,
    on_grid,
    progressive_search,
    spread,
    uniform_grid,
)
from lampq.quant.base import Quantizer
from lampq.quant.fold import NormFold
from lampq.quant.log import LogQuantizer, ZeroCode
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer, token_grid, token_size
from lampq.quant.uniform import UniformQuantizer
from lampq.types import SEARCHED_ROLES, LayerBits, LayerRole, LayerSpec, MatmulSpec, Profile

FOLD_POWERS = (1.0, 0.75, 0.5, 0.25)
# how far static ranges of first tokens go beyond what was seen, at either end
PREFIX_ROOM = 0.125
# enough to tell folds apart
COARSE = SearchDepth(candidates=32, steps=1)


@dataclass(frozen=True, slots=True)
class AdaLog:
    """The calibrate stage of AdaLog.

    ``search``: "exhaustive" is the published depth, three rounds of six full steps; "fast" screens
    the candidates by a cheap error first and does one round.
    ``tokens`` and ``maps`` bound the inputs and attention maps that score activation scales.
    ``onebit``: at one bit, levels {0, scale} ("adalog") or two free levels ("affine").
    ``compensation``: "none" rounds to nearest as published; "gptq" lets the weights that are not
    yet rounded absorb the error of those that are, and of the input (GPTQ on the quantized input).
    ``damping`` is the share of the mean diagonal that is added to the diagonal of its Gram matrix.
    ``fold``: how far the scales of the channels behind a norm are evened out. "full" makes them all
    equal, as published, which leaves their differences to the weight; "searched" takes the power of
    the scales, out of FOLD_POWERS, with the least output error.
    ``error``: "plain" sums the squared output error over tokens, as published. Where a few tokens
    are enormous they alone make that sum, and everything else may be rounded to zero. "relative"
    also looks at the error of each token in proportion to its size: weights are fitted to that,
    inputs to the geometric mean of both, so that large and ordinary tokens count alike.
    ``input_ranges``: "static" is published; "token" gives every token a range of its own, found at
    run time, where a searched layer has no norm before it, and in attention products.
    ``prefix_bits``: the width of class and register tokens in the inputs of searched layers and in
    attention products; behind norms their ranges are static, elsewhere found at run time.
    "target" treats them like patches, as published.
    ``profile``: "speed" gives the input behind GELU a uniform grid, as integer kernels need it.
    """

    name: ClassVar[str] = "adalog"
    search: Literal["fast", "exhaustive"] = "fast"
    tokens: int = 768
    maps: int = 8
    zero_code: ZeroCode = "extra"
    onebit: Literal["adalog", "affine"] = "adalog"
    compensation: Literal["none", "gptq"] = "none"
    damping: float = DAMPING
    fold: Literal["full", "searched"] = "full"
    error: Literal["plain", "relative"] = "plain"
    input_ranges: Literal["static", "token"] = "static"
    prefix_bits: Literal["target"] | int = "target"
    profile: Profile = "accuracy"

    @property
    def depth(self) -> SearchDepth:
        """How much of the candidate space is scored."""
        return EXHAUSTIVE if self.search == "exhaustive" else SearchDepth()

    @property
    def rounds(self) -> int:
        """How often the search alternates between weight and input."""
        return 3 if self.search == "exhaustive" else 1

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width."""
        fold = None
        weight, bias, inputs = layer.weight, layer.bias, stats.inputs
        first = None if self.prefix_bits == "target" else stats.first
        if layer.spec.norm is not None:
            fold = self._best_fold(layer, bits, without(inputs, first))
            weight, bias = fold.of_linear(weight, bias)
            inputs = fold.of_inputs(inputs)
        problem = LayerSearch(self, weight, inputs, bits, bias, first=first)
        if layer.spec.role is LayerRole.PATCH_EMBED:
            problem.search_weight()
        elif layer.spec.role is LayerRole.FC2 and self.profile == "accuracy":
            per_token = self.input_ranges == "token"
            problem.search_log_input(per_token=per_token)
            for _ in range(self.rounds):
                problem.search_weight()
                problem.search_log_input(per_token=per_token)
        else:
            per_token = self._per_token(layer.spec)
            search = problem.search_token_input if per_token else problem.search_input
            search(on_output=False)
            for _ in range(self.rounds):
                problem.search_weight()
                search(on_output=True)
        return problem.finish(layer, bias, fold)

    def _per_token(self, spec: LayerSpec) -> bool:
        """Whether the input of a layer has one range per token."""
        plain = spec.norm is None and spec.role is not LayerRole.FC2
        return self.input_ranges == "token" and plain and spec.role in SEARCHED_ROLES

    def _best_fold(self, layer: LinearView, bits: LayerBits, inputs: Tensor) -> NormFold:
        """The fold of least output error, by a coarse search of weight and input."""
        scale, zero = self._channel_scales(inputs, bits.activation)
        folds = [
            NormFold.partly(scale, zero, power, 2**bits.activation - 1)
            for power in (FOLD_POWERS if self.fold == "searched" else (1.0,))
        ]
        if len(folds) == 1:
            return folds[0]
        few = spread(inputs, self.tokens)

        def error(fold: NormFold) -> float:
            weight, bias = fold.of_linear(layer.weight, layer.bias)
            problem = LayerSearch(self, weight, fold.of_inputs(few), bits, bias, depth=COARSE)
            problem.search_input(on_output=False)
            return problem.error()

        return min(folds, key=error)

    def _channel_scales(self, inputs: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point fitted to every channel on its own."""
        rows = spread(inputs, self.tokens).T.contiguous()  # (channels, tokens)
        grid = self.input_grid(rows, bits)

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            guess = on_grid(rows, scale[..., None], zero[..., None], bits)
            return guess.sub_(rows).square_().sum(dim=-1)

        return progressive_search(grid, error, self.depth, elements=rows.numel())

    def input_grid(self, rows: Tensor, bits: int, depth: SearchDepth | None = None) -> Grid:
        """Candidates for an activation, one row per group."""
        return uniform_grid(
            rows,
            bits,
            candidates=(depth or self.depth).candidates,
            max_zeros=2**bits,
            affine=self.onebit == "affine",
        )

    def weight_grid(self, rows: Tensor, bits: int, depth: SearchDepth | None = None) -> Grid:
        """Candidates for a weight or a matmul operand, one row per group."""
        return uniform_grid(
            rows,
            bits,
            candidates=(depth or self.depth).candidates,
            max_zeros=max(1, 2 ** (bits - 1)),
            affine=self.onebit == "affine",
        )

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """Operand quantizers per head; the softmax output gets a searched logarithmic base."""
        left, right = spread(stats.left, self.maps), spread(stats.right, self.maps)
        prefix = 0 if self.prefix_bits == "target" else site.prefix
        # the products of patches alone: what else there is has a width of its own
        left = left[..., prefix:, :] if site.kind == "qk" else left[..., prefix:, prefix:]
        right = right[..., prefix:] if site.kind == "qk" else right[..., prefix:, :]
        exact = left @ right
        right_hat = right
        axis = -2 if site.kind == "qk" else -1
        fitted_left: Quantizer
        for _ in range(self.rounds):
            if site.kind == "av":
                fitted_left = self._softmax(left, right_hat, exact, left_bits)
            else:
                fitted_left = self._operand(left, left_bits, exact, other=right_hat, first=True)
            left_hat = fitted_left(left)
            fitted_right = self._operand(
                right, right_bits, exact, other=left_hat, first=False, axis=axis
            )
            right_hat = fitted_right(right)
        return MatmulFit(
            site,
            self.with_prefix(fitted_left, prefix),
            self.with_prefix(fitted_right, prefix, axis=axis),
        )

    def with_prefix(
        self, body: Quantizer, count: int, axis: int = -1, seen: Tensor | None = None
    ) -> Quantizer:
        """The quantizer of patches, with the first tokens at their own width where they have one.

        ``axis`` is where the channels are. ``seen`` are first tokens: where patches have one static
        grid they get one too, as integer kernels need it, else ranges found at run time.
        """
        if self.prefix_bits == "target" or not count:
            return body
        prefix: Quantizer = TokenQuantizer(self.prefix_bits, torch.ones(1), axis=axis)
        if isinstance(body, UniformQuantizer) and seen is not None and seen.numel():
            low, high = seen.amin().clamp(max=0), seen.amax().clamp(min=0)
            room = PREFIX_ROOM * (high - low)
            prefix = UniformQuantizer.between(self.prefix_bits, low - room, high + room, whole=True)
        return PrefixQuantizer(body.bits, prefix, body, count=count, axis=axis)

    def _operand(
        self,
        operand: Tensor,
        bits: int,
        exact: Tensor,
        *,
        other: Tensor,
        first: bool,
        axis: int = -1,
    ) -> UniformQuantizer | TokenQuantizer:
        """A uniform quantizer per head, by the error of the product with the other operand.

        With ranges per token, each head takes a part of them; the channels are on ``axis``.
        """
        if self.input_ranges == "token":
            step, zero = token_grid(operand, bits, axis)

            def part(clip: Tensor, _: Tensor) -> Tensor:
                return on_grid(operand, _of_heads(clip) * step, zero, bits)

            parts = clip_grid(operand.shape[1], operand)
            clip, _ = self._searched_operand(parts, part, operand, exact, other, first=first)
            return TokenQuantizer(bits, clip.clamp(max=1)[:, None, None], axis=axis)

        def guess(scale: Tensor, zero: Tensor) -> Tensor:  # (candidates, maps, heads, ., .)
            return on_grid(operand, _of_heads(scale), _of_heads(zero), bits)

        grid = self.weight_grid(operand.transpose(0, 1).flatten(1), bits)
        scale, zero = self._searched_operand(grid, guess, operand, exact, other, first=first)
        return UniformQuantizer(bits, scale[:, None, None], zero[:, None, None])

    def _searched_operand(
        self,
        grid: Grid,
        guess: Error,
        operand: Tensor,
        exact: Tensor,
        other: Tensor,
        *,
        first: bool,
    ) -> tuple[Tensor, Tensor]:
        """The best of the candidates, whose operands (candidates, maps, ...) are the guess."""

        def cheap(scale: Tensor, zero: Tensor) -> Tensor:
            return guess(scale, zero).sub_(operand).square_().sum(dim=(1, 3, 4))

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            one = guess(scale, zero)
            product = one @ other if first else other @ one
            return product.sub_(exact).square_().sum(dim=(1, 3, 4))

        return progressive_search(grid, error, self.depth, cheap=cheap, elements=operand.numel())

    def _softmax(
        self, left: Tensor, right: Tensor, exact: Tensor, bits: int
    ) -> LogQuantizer | TokenLogQuantizer:
        """A logarithmic quantizer with scale one and the base of least product error.

        With ranges per token the scale of each row is its largest probability.

        The error of the probabilities alone is a poor guide: it is made by the few large ones,
        while the product sums up the many small ones that a narrow base takes for zero. So bases
        from the whole range are scored by the product too.
        """
        one = left.new_ones(1)
        size = one
        quantizer: Callable[[int, Tensor, int], LogQuantizer | TokenLogQuantizer] = self.log
        if self.input_ranges == "token":
            size, quantizer = token_size(left, torch.zeros_like(one), -1), self.token_log
        shares = left / size
        logs = shares.clamp_min(1e-15).log2_()

        def cheap(step: int) -> float:
            guess = log_decoded(logs, one, one * step, self.powers(bits))
            return float(guess.sub_(shares).mul_(size).square_().sum())

        def error(step: int) -> float:
            return float((quantizer(bits, one, step)(left) @ right - exact).square_().sum())

        depth = self.depth
        tried = set(STEPS[:: depth.stride])
        if depth.screen:
            tried |= set(sorted(STEPS, key=cheap)[: depth.screen])
        best = min(sorted(tried), key=error)
        near = [step for step in STEPS if abs(step - best) < depth.stride]
        return quantizer(bits, one, min(near, key=error))

    def powers(self, bits: int) -> int:
        """How many powers a logarithmic quantizer has beside zero."""
        return int(2**bits) - (self.zero_code == "reserved")

    def log(self, bits: int, scale: Tensor, step: int, shift: Tensor | None = None) -> LogQuantizer:
        """A logarithmic quantizer with this method's zero code."""
        shift = torch.zeros_like(scale) if shift is None else shift
        return LogQuantizer(bits, scale, shift, shift, step=step, zero_code=self.zero_code)

    def token_log(
        self, bits: int, clip: Tensor, step: int, shift: Tensor | None = None
    ) -> TokenLogQuantizer:
        """The same with a scale for every token."""
        shift = torch.zeros_like(clip) if shift is None else shift
        return TokenLogQuantizer(bits, clip, shift, step=step, zero_code=self.zero_code)


def _of_heads(values: Tensor) -> Tensor:
    """Values (candidates, heads) against operands (maps, heads, rows, columns)."""
    return values[:, None, :, None, None]

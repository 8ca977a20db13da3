"""AdaLog's alternating search for one layer: the weight grid given the input's, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lampq.methods.base import LinearView
from lampq.methods.compensate import MOST_INPUTS, compensated_codes
from lampq.methods.search import (
    Error,
    Grid,
    SearchDepth,
    clip_grid,
    log_decoded,
    on_grid,
    progressive_search,
    spread,
)
from lampq.quant.base import Quantizer, compact
from lampq.quant.fold import NormFold, absorb_shift
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import LayerFit
from lampq.quant.prefix import applied_to_rows
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer, token_grid, token_size
from lampq.quant.twin import GELU_MINIMUM
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits

if TYPE_CHECKING:
    from lampq.methods.adalog import AdaLog

STEPS = range(10, 138)
# the least part of the size of a token that its powers may begin with
LEAST_PART = 0.01


def without(rows: Tensor, first: Tensor | None) -> Tensor:
    """Those of the tokens without a width of their own; all where there are no such."""
    return rows if first is None or bool(first.all()) else rows[~first]


class LayerSearch:
    """The alternating search for one layer: weight grid given the input's, and back.

    ``first`` tells which tokens have a width of their own: the grid of the input is that of the
    others.
    """

    def __init__(
        self,
        method: AdaLog,
        weight: Tensor,
        inputs: Tensor,
        bits: LayerBits,
        bias: Tensor | None = None,
        depth: SearchDepth | None = None,
        first: Tensor | None = None,
    ) -> None:
        self.method, self.bits, self.depth = method, bits, depth or method.depth
        self.weight, self.inputs, self.first = weight, inputs, first
        self.shares = torch.ones(len(inputs)).to(inputs)
        if method.error == "relative":
            size = (inputs @ weight.T + (0 if bias is None else bias)).square().sum(dim=1)
            inverse = 1 / (size + size.median()).clamp_min(1e-30)
            self.shares = inverse / inverse.mean()
        self.sampled = spread(without(inputs, first), method.tokens)
        self.sampled_shares = spread(without(self.shares, first), method.tokens)
        self.input_quantizer: (
            UniformQuantizer | LogQuantizer | TokenQuantizer | TokenLogQuantizer | None
        ) = None
        self.weight_quantizer = self._nearest_weight()

    def _nearest_weight(self) -> UniformQuantizer:
        """The grid of least weighted squared error of the weight itself."""
        power = self.shares @ self.inputs.square() / len(self.inputs)

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            return self._weight_error(scale, zero).square_() @ power

        return self._searched_weight(error, None)

    def _searched_weight(self, error: Error, cheap: Error | None) -> UniformQuantizer:
        grid = self.method.weight_grid(self.weight, self.bits.weight, self.depth)
        scale, zero = progressive_search(
            grid, error, self.depth, cheap=cheap, elements=self.weight.numel()
        )
        return UniformQuantizer(self.bits.weight, scale[:, None], zero[:, None])

    def _weight_error(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Errors of the weight (candidates, outputs, inputs)."""
        decoded = on_grid(self.weight, scale[..., None], zero[..., None], self.bits.weight)
        return decoded.sub_(self.weight)

    def _quantized_inputs(self) -> Tensor:
        quantizer = self._whole_quantizer(self.input_quantizer)
        return applied_to_rows(quantizer, self.inputs, self.first)

    def _whole_quantizer(self, body: Quantizer | None, count: int = 1) -> Quantizer | None:
        """The quantizer of all tokens, of which the first ``count`` may have another width."""
        if body is None or self.first is None:
            return body
        return self.method.with_prefix(body, count, seen=self.inputs[self.first])

    def _of_tokens(self, squared: Tensor) -> Tensor:
        """One error of the squared errors (..., tokens) of the sampled tokens or some of them."""
        plain = squared.sum(dim=-1)
        if self.method.error == "plain":
            return plain
        shares = spread(self.sampled_shares, squared.shape[-1])
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
        """Weight scales of least output error with the input quantizer as it is.

        Of a layer with very many inputs the error is that of inputs without correlation: its Gram
        matrix would not fit into memory.
        """
        if self.weight.shape[1] > MOST_INPUTS:
            self.weight_quantizer = self._nearest_weight()
            return
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

        def guess(scale: Tensor, zero: Tensor) -> Tensor:
            return on_grid(x, scale[..., None], zero[..., None], bits)

        grid = self.method.input_grid(x.reshape(1, -1), bits, self.depth)
        scale, zero = self._searched_input(grid, guess, on_output=on_output)
        self.input_quantizer = UniformQuantizer(bits, scale[0], zero[0])

    def search_token_input(self, *, on_output: bool) -> None:
        """The part of the range of every token that has the least of these errors."""
        x, bits = self.sampled, self.bits.activation
        step, zero = token_grid(x, bits, -1)

        def guess(clip: Tensor, _: Tensor) -> Tensor:
            return on_grid(x, clip[..., None] * step, zero, bits)

        clip, _ = self._searched_input(clip_grid(1, x), guess, on_output=on_output)
        self.input_quantizer = TokenQuantizer(bits, clip[0].clamp(max=1))

    def _searched_input(
        self, grid: Grid, guess: Error, *, on_output: bool
    ) -> tuple[Tensor, Tensor]:
        """The best of the candidates, whose inputs (candidates, tokens, channels) are the guess."""
        x = self.sampled
        decoded, power, exact = self._input_errors()
        if not on_output:
            power = torch.ones_like(power)

        def cheap(scale: Tensor, zero: Tensor) -> Tensor:
            return self._of_tokens(guess(scale, zero).sub_(x).square_() @ power)[:, None]

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            output = guess(scale, zero) @ decoded.T
            return self._of_tokens(output.sub_(exact).square_().sum(dim=2))[:, None]

        true = error if on_output else cheap
        return progressive_search(grid, true, self.depth, cheap=cheap, elements=x.numel())

    def search_log_input(self, *, per_token: bool) -> None:
        """Scale and base of the shifted logarithmic quantizer of least output error.

        With ``per_token`` the scale is a part of the largest value of each token.
        """
        method, bits = self.method, self.bits.activation
        shift = torch.clamp(-self.inputs.min(), min=GELU_MINIMUM)
        x = self.sampled + shift
        size = x.new_ones(1, 1)
        if per_token:
            size = token_size(self.sampled, shift, -1)
            x = x / size
        logs = x.clamp_min(1e-15).log2()
        decoded, power, exact = self._input_errors()
        exact = exact + shift * decoded.sum(dim=1)
        count = method.tokens // 4
        few, few_logs, few_squares = (spread(t, count) for t in (x, logs, size.square()))

        def cheap(scale: Tensor, step: Tensor) -> Tensor:
            guess = log_decoded(few_logs, scale[..., None], step[..., None], method.powers(bits))
            return self._of_tokens((guess.sub_(few).square_() @ power) * few_squares[:, 0])[:, None]

        def error(scale: Tensor, step: Tensor) -> Tensor:
            pairs = zip(scale, step, strict=True)
            guesses = torch.stack([method.log(bits, s, int(q))(x) for s, q in pairs])
            squared = (guesses @ decoded.T).mul_(size).sub_(exact).square_().sum(dim=2)
            return self._of_tokens(squared)[:, None]

        grid = self._log_grid(x, shift / size, cheap)
        scale, step = progressive_search(grid, error, self.depth, cheap=cheap, elements=x.numel())
        shift = shift.reshape(1)
        if per_token:
            clip = scale.clamp(LEAST_PART, 1)
            self.input_quantizer = method.token_log(bits, clip, int(step), shift)
        else:
            self.input_quantizer = method.log(bits, scale, int(step), shift)

    def _log_grid(self, x: Tensor, shift: Tensor, cheap: Error) -> Grid:
        """The eight best bases at the scale so far, with every scale of a ladder."""
        positive = x[x > shift] if bool((x > shift).any()) else x.flatten()
        # above zero, also where there is nothing in the input
        high = positive.max().clamp_min(1e-8)
        near = positive.kthvalue(max(1, round(0.9 * positive.numel()))).values.clamp_min(1e-8)
        ladder = torch.linspace(0, 1, 16).to(x) * (high - near) + near
        spacing = ((high - near) / 15).clamp_min(1e-8).reshape(1)
        known = self.input_quantizer
        start = ladder[-2]
        if isinstance(known, LogQuantizer):
            start = known.scale
        if isinstance(known, TokenLogQuantizer):
            start = known.clip
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
        if self.first is not None:
            # each part decodes to what it stands for: one bias cannot absorb the shift of one part
            whole = self._whole_quantizer(self.input_quantizer, layer.spec.prefix)
            return LayerFit(layer.spec, self.bits, codes, bias, self.weight_quantizer, whole, fold)
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
            codes = self.weight_quantizer.encode(self.weight)
            return compact(codes, self.bits.weight), bias
        return compensated_codes(
            self.weight,
            bias,
            self.inputs,
            self._quantized_inputs(),
            self.weight_quantizer,
            self.shares,
            self.method.damping,
        )

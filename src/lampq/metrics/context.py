"""What a change of width would do inside the quantized model.

The cost of a layer alone, all else in float, is a poor guide once everything is quantized: errors
cancel, add up and saturate. Here the KL divergence of the quantized model from the float one is
differentiated with respect to every layer's output, through the rounding (straight-through). With
d = gradient . change of the output when the layer alone changes its width, the prediction is
E[d] + E[d**2] / 2, the second term standing for the curvature. One forward and backward pass
predicts the effect of every single change, with its sign.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.data import Samples
from lampq.methods.base import FitCache, layer_output
from lampq.progress import Progress
from lampq.quant.base import Quantizer
from lampq.quant.modules import LayerFit, QuantLayer, QuantMatMul, assemble
from lampq.types import BitPlan, LayerBits

Changes = Mapping[str, Mapping[LayerBits, float]]
BATCH = 16


class _StraightThrough(nn.Module):
    """A quantizer whose gradient is that of the identity."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def forward(self, x: Tensor) -> Tensor:
        still = x.detach()
        rounded: Tensor = self.quantizer(still)
        return x + (rounded - still)


def _differentiable(model: nn.Module) -> nn.Module:
    """The assembled model with gradients through its rounding; the model itself is changed."""
    for module in list(model.modules()):
        if isinstance(module, QuantLayer) and module.input_quantizer is not None:
            module.input_quantizer = _StraightThrough(module.input_quantizer)  # type: ignore
        elif isinstance(module, QuantMatMul):
            module.left = _StraightThrough(module.left)  # type: ignore[assignment]
            module.right = _StraightThrough(module.right)  # type: ignore[assignment]
    return model


def _float_input(fit: LayerFit, x: Tensor) -> Tensor:
    """The input of a layer in the coordinates of the float model, (tokens, channels)."""
    unfolded = x if fit.fold is None else (x + fit.fold.shift) * fit.fold.ratio
    return unfolded.flatten(0, -2)


def context_changes(
    fits: FitCache,
    plan: BitPlan,
    samples: Samples,
    reference: Tensor,
    moves: Mapping[str, tuple[LayerBits, ...]],
    progress: Progress | None = None,
) -> Changes:
    """Predicted change of the mean KL divergence for each move of one layer to another width.

    ``reference`` holds the float model's logits on the samples.
    """
    fits.prefetch((name, bits) for name, widths in moves.items() for bits in widths)
    model = _differentiable(assemble(fits.model, *fits.of_plan(plan)))
    seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            x, y = arguments[0].detach(), output.detach()
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: seen.__setitem__(name, (x, y, gradient))
            )

        return model.get_submodule(name).register_forward_hook(keep)

    totals = {name: dict.fromkeys(widths, 0.0) for name, widths in moves.items()}
    for name in moves:
        watch(name)
    batches = -(-len(samples) // BATCH)
    start = 0
    for images, _ in (progress or Progress()).track(
        samples.batches(BATCH), "effects of single changes", batches
    ):
        target = reference[start : start + len(images)].log_softmax(dim=1)
        start += len(images)
        seen.clear()
        with torch.enable_grad():
            logits = model(images.clone().requires_grad_())
            loss = F.kl_div(logits.log_softmax(dim=1), target, reduction="sum", log_target=True)
            loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, widths in moves.items():
                x, y, gradient = seen[name]
                inputs = _float_input(fits.layer(name, plan[name]), x)
                for bits in widths:
                    moved = layer_output(fits.layer(name, bits), inputs).view_as(y)
                    effect = (gradient * (moved - y)).reshape(len(images), -1).sum(dim=1)
                    totals[name][bits] += float((effect + effect.square() / 2).sum())
    return {
        name: {bits: total / len(samples) for bits, total in widths.items()}
        for name, widths in totals.items()
    }

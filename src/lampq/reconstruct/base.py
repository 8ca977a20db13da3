"""What a finisher works on, and what all of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lampq.data import Samples
from lampq.progress import Progress
from lampq.quant.modules import LayerFit, SiteFit
from lampq.reconstruct.trainable import TrainableLayer, TrainableQuantizer, layers_of, quantizers
from lampq.types import ModelGraph


class StateStore(Protocol):
    """Keeps the tensors of finished pieces of work between runs."""

    def load(self, key: str) -> Mapping[str, Tensor] | None:
        """The stored tensors, if there are any."""
        ...

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors under a key."""
        ...


class NoStore:
    """Keeps nothing."""

    def load(self, key: str) -> Mapping[str, Tensor] | None:
        """Nothing is ever there."""
        del key
        return None

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class Finish:
    """What a finisher works on; nothing of it may be changed.

    Attributes:
        model: The float model in explicit form.
        graph: Its sites.
        layers: The fits of all layers at the widths of the plan.
        sites: The fits of attention products and sums.
        samples: Calibration images, without those that the result is judged on.
        seed: The seed of every draw.
        progress: Loops go through ``progress.track``.
        store: Keeps tensors of finished pieces, for resuming.
        offer: To be called with a quantized model that is there before the last one. Of those
            offered and the last, the best on images kept from the work is the result.
    """

    model: nn.Module
    graph: ModelGraph
    layers: tuple[LayerFit, ...]
    sites: tuple[SiteFit, ...]
    samples: Samples
    seed: int = 0
    progress: Progress = field(default_factory=Progress)
    store: StateStore = field(default_factory=NoStore)
    offer: Callable[[nn.Module], None] = lambda model: None


class Finisher(Protocol):
    """Improves a quantized model after its plan is known, on the calibration images."""

    def __call__(self, job: Finish) -> nn.Module:
        """The quantized model, widths unchanged."""
        ...


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates: of the codes, of all scales, and of biases and norms; 0 leaves them alone."""

    weights: float
    scales: float
    affine: float

    def optimizer(self, module: nn.Module) -> torch.optim.Adam:
        """Adam on the parts of a trainable module that have a rate; the others are frozen."""
        latents = [layer.latent for layer in layers_of(module) if layer.latent is not None]
        sites: list[TrainableLayer | TrainableQuantizer] = [
            *layers_of(module),
            *quantizers(module),
        ]
        scales = [site.log_scale for site in sites if site.log_scale is not None]
        affine: list[Tensor] = [layer.bias for layer in layers_of(module)]
        for part in module.modules():
            if isinstance(part, nn.LayerNorm) and part.elementwise_affine:
                affine += [p for p in (part.weight, part.bias) if p is not None]
        for parameter in module.parameters():
            parameter.requires_grad = False
        groups: list[dict[str, Any]] = []
        kinds: tuple[tuple[Sequence[Tensor], float], ...] = (
            (latents, self.weights),
            (scales, self.scales),
            (affine, self.affine),
        )
        for tensors, rate in kinds:
            if rate and tensors:
                for tensor in tensors:
                    tensor.requires_grad = True
                groups.append({"params": list(tensors), "lr": rate, "peak": rate})
        return torch.optim.Adam(groups, fused=True)


def follow_cosine(optimizer: torch.optim.Optimizer, done: float) -> None:
    """Set the rates to half a cosine of the done share of the work, after a short rise."""
    factor = min(1.0, 0.02 + done / 0.03) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def roundness(module: nn.Module, power: float) -> Tensor:
    """How far the codes between two are from either, summed (the regulariser of AdaRound)."""
    total = torch.zeros(())
    for layer in layers_of(module):
        if layer.floor is not None:
            total = total + (1 - (2 * layer.up() - 1).abs().pow(power)).sum()
    return total

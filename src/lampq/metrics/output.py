"""Metrics that look at the real error of each layer at each width.

The Fisher trace of a weight knows nothing of the error of the layer's input, which dominates where
activations have outliers. Here the output error e of a layer, weight and input quantized, is
measured at every width and weighed by the curvature of the log-likelihood at that output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from lampq.methods.base import LinearView, layer_output
from lampq.metrics.base import Evidence, Sensitivity
from lampq.metrics.fisher import gradients
from lampq.passes import Labels
from lampq.quant.modules import assemble
from lampq.task import Prefix
from lampq.types import CostTable, LayerBits, LayerSpec


@dataclass(frozen=True, slots=True)
class OutputFisher:
    """Expected KL divergence of one layer at one width, to second order.

    With g the gradient of the log-likelihood of a label drawn from the model and e the output
    error, E[(g . e)**2] / 2 is the second-order KL divergence. ``form``: "projected" is that
    expectation per image; "diagonal" sums g**2 e**2, which ignores how errors add up across tokens
    and channels; "both" takes their geometric mean.
    """

    images: int = 128
    draws: int = 1
    labels: Labels = "model"
    form: Literal["projected", "diagonal", "both"] = "both"

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        """Costs of all layers at all widths."""
        layers = evidence.graph.allocatable
        how = f"{self.form} {self.images} {self.draws} {self.labels}"
        cost = evidence.journal.once(
            f"output fisher {how} {[str(c) for c in choices]}",
            lambda: self._measure(evidence, choices).tolist(),
        )
        table = CostTable(layers, choices, np.array(cost))
        return Sensitivity(table, {"form": self.form})

    @torch.no_grad()
    def _measure(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Any:
        layers = evidence.graph.allocatable
        evidence.fits.prefetch((layer.name, bits) for layer in layers for bits in choices)
        samples = evidence.samples.subset(self.images, evidence.seed)
        projected = np.zeros((len(layers), len(choices)))
        diagonal = np.zeros_like(projected)
        views = [LinearView.of(evidence.model, layer) for layer in layers]
        names = [layer.name for layer in layers]
        batches = -(-len(samples) // evidence.task.at_once(16))
        for draw in range(self.draws):
            steps = gradients(
                evidence.model,
                names,
                samples,
                self.labels,
                seed=evidence.seed + draw,
                passes=evidence.task,
            )
            for count, seen in evidence.progress.track(steps, "output errors", batches):
                for row, (layer, view) in enumerate(zip(layers, views, strict=True)):
                    x, g = seen[layer.name]
                    exact = x @ view.weight.T + view.bias
                    for column, bits in enumerate(choices):
                        fit = evidence.fits.layer(layer.name, bits)
                        weighed = (layer_output(fit, x) - exact) * g
                        per_image = weighed.reshape(count, -1)
                        projected[row, column] += float(per_image.sum(dim=1).square().sum())
                        diagonal[row, column] += float(per_image.square().sum())
        scale = 0.5 / (len(samples) * self.draws)
        forms = {
            "projected": projected,
            "diagonal": diagonal,
            "both": np.sqrt(projected * diagonal),
        }
        return forms[self.form] * scale


@dataclass(frozen=True, slots=True)
class MeasuredHarm:
    """What only one layer at one width does to the model, measured.

    ``signal``: "kl" is the KL divergence from the float model, "loss" the rise of the cross entropy
    of the labels, or of the float model's answers where there are none; of a detector that of its
    training losses. On few images the loss may fall.
    """

    images: int = 64
    signal: Literal["kl", "loss"] = "kl"

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        """Costs of all layers at all widths."""
        layers = evidence.graph.allocatable
        samples = evidence.samples.subset(self.images, evidence.seed)
        cache: list[Prefix] = []
        task = evidence.task

        def measure(layer: LayerSpec, bits: LayerBits) -> float:
            if not cache:
                cache.append(task.prefix(evidence.model, evidence.graph.blocks, samples))
            quantized = assemble(evidence.model, [evidence.fits.layer(layer.name, bits)])
            reference = cache[0].answers
            before, after = (
                task.quality(answers, reference, samples).signal(self.signal)
                for answers in (reference, cache[0].predict(quantized, layer.block))
            )
            return before - after

        pairs = [(layer, bits) for layer in layers for bits in choices]
        evidence.fits.prefetch((layer.name, bits) for layer, bits in pairs)
        values = [
            evidence.journal.once(
                f"{self.signal} {len(samples)} {layer.name} {bits}",
                partial(measure, layer, bits),
            )
            for layer, bits in evidence.progress.track(
                pairs, f"measuring {self.signal}", len(pairs)
            )
        ]
        cost = np.array(values).reshape(len(layers), len(choices))
        return Sensitivity(CostTable(layers, choices, cost), {})


@dataclass(frozen=True, slots=True)
class ReconstructionError:
    """Relative squared output error of each layer at each width."""

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        """Costs of all layers at all widths."""
        layers = evidence.graph.allocatable
        evidence.fits.prefetch((layer.name, bits) for layer in layers for bits in choices)
        cost = [
            [evidence.fits.error(layer.name, bits) for bits in choices]
            for layer in evidence.progress.track(layers, "reconstruction errors", len(layers))
        ]
        return Sensitivity(CostTable(layers, choices, np.array(cost)), {})

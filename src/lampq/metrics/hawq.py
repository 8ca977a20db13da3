"""HAWQ-V2's sensitivity: mean curvature times the squared change of the weight.

Dong et al., NeurIPS 2020; as the cost of an integer program in HAWQ-V3 (Yao et al., ICML 2021).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lampq.calibrate import LayerStats
from lampq.data import AnySamples, Samples
from lampq.methods.base import LinearView
from lampq.metrics.base import Evidence, Sensitivity
from lampq.metrics.fisher import fisher_traces, gradients
from lampq.passes import Labels, drawn_labels
from lampq.quant.modules import LayerFit
from lampq.quant.prefix import applied_to_rows
from lampq.types import CostTable, LayerBits, LayerSpec, separate


def hutchinson_traces(
    model: nn.Module,
    layers: tuple[LayerSpec, ...],
    samples: Samples,
    *,
    labels: Labels = "model",
    draws: int = 16,
    seed: int = 0,
    batch: int = 16,
) -> Mapping[str, float]:
    """Trace of the Hessian of the mean loss with respect to each layer's weight, estimated.

    The mean of v . H v over random signs v, one vector for all weights together as in HAWQ-V2: the
    terms between different layers have mean zero. The loss is the cross entropy of labels drawn
    from the model, or of the samples' own.
    """
    if labels == "data":
        samples.require_labels("a Hessian trace with labels='data'")
    generator = torch.Generator().manual_seed(seed)
    weights = {
        layer.name: model.get_parameter(f"{layer.name}.weight").detach().clone().requires_grad_()
        for layer in layers
    }
    totals = dict.fromkeys(weights, 0.0)
    for images, known in samples.batches(batch):
        # fused attention has no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            logits = functional_call(
                model, {f"{name}.weight": weight for name, weight in weights.items()}, (images,)
            )
            answer = drawn_labels(logits, generator) if labels == "model" else known
            loss = F.cross_entropy(logits, answer, reduction="sum")  # type: ignore[arg-type]
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            for draw in range(draws):
                signs = [_signs(weight, generator) for weight in weights.values()]
                products = torch.autograd.grad(
                    slopes, list(weights.values()), signs, retain_graph=draw + 1 < draws
                )
                for name, v, product in zip(weights, signs, products, strict=True):
                    totals[name] += float((v * product).sum(dtype=torch.float64))
    return {name: total / (draws * len(samples)) for name, total in totals.items()}


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(2, like.shape, generator=generator)
    return (2 * drawn - 1).to(like)


def positive(traces: Mapping[str, float]) -> dict[str, float]:
    """The traces, those that are not positive raised to the least positive one, with a warning.

    A negative one would reward narrow widths. If none is positive, all are one.
    """
    above = [trace for trace in traces.values() if trace > 0]
    low = sorted(name for name, trace in traces.items() if trace <= 0)
    if low:
        warnings.warn(
            f"the trace of {len(low)} of {len(traces)} layers is not positive, that of {low[0]!r} "
            "among them: raised to the least positive one",
            stacklevel=2,
        )
    floor = min(above, default=1.0)
    return {name: trace if trace > 0 else floor for name, trace in traces.items()}


def weight_change(fit: LayerFit, weight: Tensor) -> float:
    """Squared norm of the change of the weight, in the coordinates of the float weight."""
    decoded = fit.weight if fit.fold is None else fit.weight / fit.fold.ratio
    return float((decoded - weight).square().sum(dtype=torch.float64))


def input_change(fit: LayerFit, stats: LayerStats) -> float:
    """Mean squared change of an input element, in the coordinates of the float inputs."""
    folded = stats.inputs if fit.fold is None else fit.fold.of_inputs(stats.inputs)
    change = applied_to_rows(fit.input_quantizer, folded, stats.first) - folded
    if fit.fold is not None:
        change = change * fit.fold.ratio
    return float(change.square().mean(dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class Hawq:
    """(trace / weights) x squared change of the weight.

    ``hessian``: "fisher" takes the trace of the Fisher matrix, which is the Hessian's where the
    model fits its data; "hutchinson" estimates the Hessian's on ``trace_images`` images.

    Where activation widths are chosen separately, the same is added for the layer's input: trace of
    the Fisher matrix of the input x mean squared change of its elements. (Trace over elements times
    squared norm of the change, as for the weight.) HAWQ-V2 treats activations likewise; otherwise
    the cost knows of the weight alone, as published.
    """

    images: int = 128
    trace_images: int = 64
    labels: Labels = "model"
    hessian: Literal["fisher", "hutchinson"] = "fisher"
    draws: int = 16

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        """Costs of all layers at all widths."""
        layers = evidence.graph.allocatable
        evidence.fits.prefetch((layer.name, bits) for layer in layers for bits in choices)
        samples = evidence.samples.subset(self._trace_images, evidence.seed)
        key = f"{self.hessian} traces {len(samples)} {self.labels}"
        if self.hessian == "hutchinson":
            key += f" {self.draws}"
        journal = evidence.journal.of_model
        traces = positive(journal.once(key, lambda: self._traces(evidence, samples)))
        details: dict[str, Any] = {"hessian": self.hessian, "trace": traces}
        cost = np.zeros((len(layers), len(choices)))
        for row, layer in enumerate(layers):
            weight = LinearView.of(evidence.model, layer).weight
            for column, bits in enumerate(choices):
                change = weight_change(evidence.fits.layer(layer.name, bits), weight)
                cost[row, column] = traces[layer.name] / layer.n_params * change
        if separate(choices):
            inner = journal.once(
                f"input traces {self.images} {self.labels}", lambda: self._input_traces(evidence)
            )
            details["input_trace"] = inner
            for row, layer in enumerate(layers):
                seen = evidence.fits.stats(layer.name)
                for column, bits in enumerate(choices):
                    fit = evidence.fits.layer(layer.name, bits)
                    cost[row, column] += inner[layer.name] * input_change(fit, seen)
        return Sensitivity(CostTable(layers, choices, cost), details)

    @property
    def _trace_images(self) -> int:
        return self.trace_images if self.hessian == "hutchinson" else self.images

    def _traces(self, evidence: Evidence, samples: AnySamples) -> dict[str, float]:
        layers = evidence.graph.allocatable
        if self.hessian == "hutchinson":
            assert isinstance(samples, Samples), "checked by the task"
            return dict(
                hutchinson_traces(
                    evidence.model,
                    layers,
                    samples,
                    labels=self.labels,
                    draws=self.draws,
                    seed=evidence.seed,
                )
            )
        return dict(
            fisher_traces(
                evidence.model,
                layers,
                samples,
                labels=self.labels,
                seed=evidence.seed,
                passes=evidence.task,
            )
        )

    def _input_traces(self, evidence: Evidence) -> dict[str, float]:
        """Trace of the Fisher matrix of each layer's input, by the gradient at its output."""
        layers = evidence.graph.allocatable
        samples = evidence.samples.subset(self.images, evidence.seed)
        weights = {layer.name: LinearView.of(evidence.model, layer).weight for layer in layers}
        totals = dict.fromkeys(weights, 0.0)
        steps = gradients(
            evidence.model,
            list(weights),
            samples,
            self.labels,
            seed=evidence.seed,
            passes=evidence.task,
        )
        for _, seen in steps:
            for name, (_x, g) in seen.items():
                totals[name] += float((g @ weights[name]).square().sum(dtype=torch.float64))
        return {name: total / len(samples) for name, total in totals.items()}

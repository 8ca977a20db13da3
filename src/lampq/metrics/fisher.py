"""LampQ's type-aware Fisher metric (section "Type-aware Fisher-based Metric", Algorithm 1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lampq.data import AnySamples
from lampq.hooks import recording, recording_gradients
from lampq.metrics.base import Evidence, Sensitivity
from lampq.passes import CLASSIFIER, Labels, Passes, backward
from lampq.quant.modules import LayerFit, QuantLayer, assemble
from lampq.task import Measured, Prefix
from lampq.types import (
    MAX_BITS,
    MIN_BITS,
    CostTable,
    LayerBits,
    LayerRole,
    LayerSpec,
    separate,
)

Signal = Literal["accuracy", "loss", "kl", "ap"]
# signals in points out of a hundred, which images can tell apart only so finely
IN_POINTS = ("accuracy", "ap")


def per_image_square(inputs: Tensor, gradient: Tensor, images: int) -> Tensor:
    """Squared Frobenius norm of each image's weight gradient, from inputs and output gradient.

    Windows of one image are joined before squaring. The cheaper of the two equal forms is used:
    <X X^T, G G^T> costs tokens squared, |G^T X|^2 costs the size of the weight.
    """
    x = inputs.reshape(images, -1, inputs.shape[-1])
    g = gradient.reshape(images, -1, gradient.shape[-1])
    tokens = x.shape[1]
    if tokens * tokens < x.shape[2] * g.shape[2]:
        products = (x @ x.transpose(1, 2)) * (g @ g.transpose(1, 2))
    else:
        products = (g.transpose(1, 2) @ x).square()
    return products.sum(dim=(1, 2), dtype=torch.float64)


Seen = dict[str, tuple[Tensor, Tensor]]


def gradients(
    model: nn.Module,
    names: list[str],
    samples: AnySamples,
    labels: Labels,
    *,
    seed: int,
    batch: int = 16,
    passes: Passes = CLASSIFIER,
) -> Iterator[tuple[int, Seen]]:
    """For each batch: number of images, and inputs and output gradients of the named layers.

    What is given is emptied when the next batch is asked for, so that no two are in memory.
    """
    generator = torch.Generator().manual_seed(seed)
    with recording(model, names) as inputs, recording_gradients(model, names) as slopes:
        for images, known in samples.batches(passes.at_once(batch)):
            backward(model, images, generator, known, labels=labels, passes=passes)
            seen = {n: (inputs[n][0].detach(), g) for n, g in slopes.items()}
            inputs.clear()
            slopes.clear()
            yield len(images), seen
            seen.clear()


def fisher_traces(
    model: nn.Module,
    layers: tuple[LayerSpec, ...],
    samples: AnySamples,
    *,
    labels: Labels = "model",
    seed: int = 0,
    batch: int = 16,
    track: Callable[[Iterator[Any]], Iterator[Any]] = lambda items: items,
    passes: Passes = CLASSIFIER,
) -> Mapping[str, float]:
    """Mean over images of the squared gradient norm of the loss, per layer.

    The loss of a classifier is the log-likelihood of a label, that of a detector the sum of its
    training losses.
    """
    totals = {layer.name: 0.0 for layer in layers}
    images = 0
    for count, seen in track(
        gradients(model, list(totals), samples, labels, seed=seed, batch=batch, passes=passes)
    ):
        images += count
        for name, (x, g) in seen.items():
            totals[name] += float(per_image_square(x, g, count).sum())
    return {name: total / images for name, total in totals.items()}


def quantized_trace(
    model: nn.Module,
    fit: LayerFit,
    cache: Prefix,
    labels: Labels,
    seed: int,
    passes: Passes = CLASSIFIER,
) -> float:
    """Fisher trace of one layer while it sits at its fitted width, all else in float.

    Measured from the layer's quantized input and its output gradient, in the coordinates of the
    float weight.
    """
    quantized = assemble(model, [fit])
    layer = quantized.get_submodule(fit.spec.name)
    assert isinstance(layer, QuantLayer), "assemble has replaced the layer"
    seen: dict[str, Tensor] = {}

    def keep(_module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = layer._quantized_input(arguments[0].detach())
        seen["x"] = x if fit.fold is None else (x + fit.fold.shift) * fit.fold.ratio
        seen["y"] = output.detach().requires_grad_()
        return seen["y"]

    handle = layer.register_forward_hook(keep)
    generator = torch.Generator().manual_seed(seed)
    total, count = 0.0, 0
    try:
        for images, known in cache.started(quantized, fit.spec.block):
            with torch.enable_grad():
                loss = passes.loss(quantized, images, known, labels, generator)
            (gradient,) = torch.autograd.grad(loss, seen["y"])
            total += float(per_image_square(seen["x"], gradient, len(images)).sum())
            count += len(images)
    finally:
        handle.remove()
    return total / count


def sampled_blocks(n_blocks: int, share: float, seed: int) -> tuple[int, ...]:
    """The blocks whose layers are probed, the same for every role."""
    count = min(n_blocks, max(1, round(share * n_blocks)))
    generator = torch.Generator().manual_seed(seed)
    return tuple(sorted(torch.randperm(n_blocks, generator=generator)[:count].tolist()))


def _one_per_role(layers: tuple[LayerSpec, ...], blocks: tuple[int, ...]) -> list[LayerSpec]:
    """The layers of the sampled blocks, and the first of every role that has none there."""
    probed = [layer for layer in layers if layer.block in blocks]
    for layer in layers:
        if all(layer.role is not other.role for other in probed):
            probed.append(layer)
    return probed


def role_scales(
    drops: Mapping[LayerRole, float],
    traces: Mapping[LayerRole, float],
    *,
    resolution: float,
) -> dict[LayerRole, float]:
    """Drop per unit of trace for each role, never negative.

    A drop below the resolution of the samples, or below a hundredth of the largest drop, is raised
    to that floor with a warning; if no probe hurts at all, every role gets the factor one.
    """
    largest = max(drops.values())
    if largest <= resolution:
        warnings.warn(
            f"no probe hurts by more than {resolution:.3g}: the role factors are all set to one; "
            "use fewer probe bits or the loss or kl signal",
            stacklevel=2,
        )
        return dict.fromkeys(drops, 1.0)
    floor = max(resolution, 0.01 * largest)
    low = sorted(role.value for role, drop in drops.items() if drop < floor)
    if low:
        warnings.warn(
            f"the probes of {', '.join(low)} hurt less than can be told: raised to {floor:.3g}",
            stacklevel=2,
        )
    return {role: max(drop, floor) / max(traces[role], 1e-30) for role, drop in drops.items()}


@dataclass(frozen=True, slots=True)
class TypeAwareFisher:
    """Omega = alpha_role * tr(F) * penalty**(-bits).

    The paper gives weight and input one width. Where the two are chosen separately, the mean of
    penalty**(-bits) over both stands for it: the same where they are equal, and as in Lemma 3 to
    first order the errors of weight and input add up. Otherwise bits are the weight's.

    ``penalty`` is the paper's gamma, ``probe_bits`` its beta, ``probe_blocks`` its mu as a share of
    the blocks. ``alpha_trace``: the trace in alpha is that of the layer at probe bits ("quantized",
    Algorithm 1) or of the float layer ("fp"). ``type_aware=False`` leaves the factors out.
    """

    penalty: float = 4.0
    probe_bits: int = 2
    probe_blocks: float = 0.5
    labels: Labels = "model"
    alpha_signal: Signal = "accuracy"
    alpha_trace: Literal["quantized", "fp"] = "fp"
    images: int = 256
    probe_images: int = 1024
    trace_images: int = 64
    type_aware: bool = True

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        """Costs of all layers at all widths."""
        layers = evidence.graph.allocatable
        samples = evidence.samples.subset(self.images, evidence.seed)
        batches = -(-len(samples) // evidence.task.at_once(16))
        traces = evidence.journal.of_model.once(
            f"fisher traces {len(samples)} {self.labels}",
            lambda: dict(
                fisher_traces(
                    evidence.model,
                    layers,
                    samples,
                    labels=self.labels,
                    seed=evidence.seed,
                    track=lambda it: evidence.progress.track(it, "Fisher traces", batches),
                    passes=evidence.task,
                )
            ),
        )
        details: dict[str, Any] = {"fisher_trace": traces}
        scales = dict.fromkeys((layer.role for layer in layers), 1.0)
        if self.type_aware:
            scales = self._scales(evidence, choices, traces, details)
        omega = np.array([scales[layer.role] * traces[layer.name] for layer in layers])
        details["role_scale"] = {role.value: value for role, value in scales.items()}
        cost = omega[:, None] * self._penalties(choices)[None]
        return Sensitivity(CostTable(layers, choices, cost), details)

    def _penalties(self, choices: tuple[LayerBits, ...]) -> NDArray[np.float64]:
        weights = np.array([bits.weight for bits in choices], dtype=np.float64)
        if not separate(choices):
            return self.penalty**-weights
        activations = np.array([bits.activation for bits in choices], dtype=np.float64)
        return (self.penalty**-weights + self.penalty**-activations) / 2

    def _scales(
        self,
        evidence: Evidence,
        choices: tuple[LayerBits, ...],
        traces: Mapping[str, float],
        details: dict[str, Any],
    ) -> dict[LayerRole, float]:
        blocks = sampled_blocks(len(evidence.graph.blocks), self.probe_blocks, evidence.seed)
        probed = _one_per_role(evidence.graph.allocatable, blocks)
        probes = probe_layers(
            evidence, probed, _probe_bits(self.probe_bits, choices), self.probe_images
        )
        used = dict(traces)
        if self.alpha_trace == "quantized":
            used = self._quantized_traces(evidence, probed, choices)
        drops = {
            layer.name: probes.base.signal(self.alpha_signal)
            - probes.quality[layer.name].signal(self.alpha_signal)
            for layer in probed
        }
        details["probe"] = {
            "blocks": blocks,
            "bits": self.probe_bits,
            "signal": self.alpha_signal,
            "drop": drops,
            "trace": {layer.name: used[layer.name] for layer in probed},
        }
        roles = {layer.role for layer in probed}

        def mean(values: Mapping[str, float], role: LayerRole) -> float:
            return float(np.mean([values[layer.name] for layer in probed if layer.role is role]))

        resolution = 100 / probes.images if self.alpha_signal in IN_POINTS else 1e-6
        return role_scales(
            {role: mean(drops, role) for role in roles},
            {role: mean(used, role) for role in roles},
            resolution=resolution,
        )

    def _quantized_traces(
        self, evidence: Evidence, probed: list[LayerSpec], choices: tuple[LayerBits, ...]
    ) -> dict[str, float]:
        samples = evidence.samples.subset(self.trace_images, evidence.seed)
        bits = _probe_bits(self.probe_bits, choices)
        cache: list[Prefix] = []
        task = evidence.task

        def measure(layer: LayerSpec) -> float:
            if not cache:
                cache.append(task.prefix(evidence.model, evidence.graph.blocks, samples, batch=16))
            fit = evidence.fits.layer(layer.name, bits)
            return quantized_trace(evidence.model, fit, cache[0], self.labels, evidence.seed, task)

        return {
            layer.name: evidence.journal.once(
                f"quantized trace {len(samples)} {self.labels} {layer.name} {bits}",
                partial(measure, layer),
            )
            for layer in evidence.progress.track(probed, "traces of probes", len(probed))
        }


def _probe_bits(weight: int, choices: tuple[LayerBits, ...]) -> LayerBits:
    """Probe width with the activation difference that the choices have; equal if separate."""
    if separate(choices):
        return LayerBits(weight, weight)
    # where a width is cut off at the end of the range, the difference is smaller there
    difference = max((bits.activation - bits.weight for bits in choices), key=abs)
    return LayerBits(weight, min(MAX_BITS, max(MIN_BITS, weight + difference)))


@dataclass(frozen=True, slots=True)
class Probes:
    """Quality of the float model, and of it with one layer quantized, by layer name."""

    base: Measured
    quality: Mapping[str, Measured]
    images: int


def probe_layers(
    evidence: Evidence, layers: list[LayerSpec], bits: LayerBits, images: int
) -> Probes:
    """The model's quality with only one layer at those bits and all else in float."""
    samples = evidence.samples.subset(images, evidence.seed)
    evidence.fits.prefetch((layer.name, bits) for layer in layers)
    cache: list[Prefix] = []
    task = evidence.task

    def opened() -> Prefix:
        if not cache:
            cache.append(task.prefix(evidence.model, evidence.graph.blocks, samples))
        return cache[0]

    def measure(layer: LayerSpec | None) -> list[Any]:
        reference = opened().answers
        answers = reference
        if layer is not None:
            quantized = assemble(evidence.model, [evidence.fits.layer(layer.name, bits)])
            answers = opened().predict(quantized, layer.block)
        return task.quality(answers, reference, samples).values()

    key = f"probe {len(samples)}"
    base = task.measured(evidence.journal.once(f"{key} base", lambda: measure(None)))
    measured = {
        layer.name: task.measured(
            evidence.journal.once(f"{key} {layer.name} {bits}", partial(measure, layer))
        )
        for layer in evidence.progress.track(layers, f"probes at {bits} bits", len(layers))
    }
    return Probes(base, measured, len(samples))

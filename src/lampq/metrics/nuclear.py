"""VT-PTQ's sensitivity: the nuclear norm of what a module gives (Liu et al., NeurIPS 2021).

A module is the attention of a block (qkv and proj, with its products) or its MLP (fc1 and fc2); all
of it has one width. Its cost at a width is the nuclear norm of its maps times the squared error of
its output there, and the cost of a plan is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lampq.metrics.base import Evidence, Sensitivity
from lampq.quant.modules import assemble
from lampq.types import CostTable, LayerBits, LayerRole, LayerSpec, MatmulSpec

ATTENTION = (LayerRole.QKV, LayerRole.PROJ)
LAST = (LayerRole.PROJ, LayerRole.FC2)
BATCH = 16


@dataclass(frozen=True, slots=True)
class Module:
    """Layers of one width, and the products of an attention.

    ``host`` is the block that holds them, or the whole model ("") for a layer outside the blocks,
    which is a module of its own.
    """

    layers: tuple[LayerSpec, ...]
    products: tuple[MatmulSpec, ...]
    host: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its layers."""
        return tuple(layer.name for layer in self.layers)

    @property
    def outputs(self) -> list[str]:
        """The layers whose output is the module's: proj or fc2, else the last."""
        last = [layer.name for layer in self.layers if layer.role in LAST]
        return last or [self.layers[-1].name]


def modules_of(evidence: Evidence) -> list[Module]:
    """The attention and the MLP of every block, in graph order."""
    found: dict[Any, list[LayerSpec]] = {}
    for layer in evidence.graph.allocatable:
        key = layer.name if layer.block < 0 else (layer.block, layer.role in ATTENTION)
        found.setdefault(key, []).append(layer)
    modules = []
    for layers in found.values():
        block, attends = layers[0].block, layers[0].role in ATTENTION
        products = [s for s in evidence.graph.matmuls if attends and s.block == block >= 0]
        host = evidence.graph.blocks[block] if block >= 0 else ""
        modules.append(Module(tuple(layers), tuple(products), host))
    return modules


def nuclear_norms(matrices: Tensor) -> Tensor:
    """Sum of the singular values of each matrix, (..., rows, columns) to (...)."""
    values: Tensor = torch.linalg.svdvals(matrices)
    return values.sum(dim=-1)


@dataclass(slots=True)
class _Seen:
    """One float pass over a batch: how the host was called, and what its modules gave."""

    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    maps: dict[str, Tensor] = field(default_factory=dict)


def _watch(
    model: nn.Module, host: str, outputs: list[str], products: list[str], seen: _Seen
) -> list[torch.utils.hooks.RemovableHandle]:
    def keep_call(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.arguments, seen.named = arguments, named

    def keep_output(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _arguments, output: seen.outputs.__setitem__(name, output)

    def keep_map(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, operands: seen.maps.__setitem__(name, operands[0])

    handles = [model.get_submodule(host).register_forward_pre_hook(keep_call, with_kwargs=True)]
    handles += [model.get_submodule(n).register_forward_hook(keep_output(n)) for n in outputs]
    handles += [model.get_submodule(n).register_forward_pre_hook(keep_map(n)) for n in products]
    return handles


def _passes(evidence: Evidence, modules: list[Module], images: int) -> Iterator[tuple[_Seen, int]]:
    """Float passes, batch by batch: all modules have the same host."""
    samples = evidence.samples.subset(images, evidence.seed)
    outputs = [name for module in modules for name in module.outputs]
    products = [site.name for module in modules for site in module.products if site.kind == "av"]
    for pictures, known in samples.batches(evidence.task.at_once(BATCH)):
        seen = _Seen()
        handles = _watch(evidence.model, modules[0].host, outputs, products, seen)
        try:
            evidence.task.forward(evidence.model, pictures, known)
        finally:
            for handle in handles:
                handle.remove()
        yield seen, len(pictures)


@dataclass(frozen=True, slots=True)
class NuclearNorm:
    """Nuclear norm of a module x squared error of its output, all of its sites at one width.

    The norm is that of the softmax for an attention, a mean over images, heads and windows, and
    that of the output (tokens, channels) for an MLP, a mean over images. An attention without known
    products takes that of its output. The error is that on float inputs, summed over the output, a
    mean over images. Each layer of a module has an equal share of its cost.
    """

    images: int = 128

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        """Costs of all layers at all widths."""
        modules = modules_of(evidence)
        layers = evidence.graph.allocatable
        by_host: dict[str, list[Module]] = {}
        for module in modules:
            by_host.setdefault(module.host, []).append(module)
        key = f"nuclear {self.images} {[str(c) for c in choices]}"
        cost: dict[str, list[float]] = {}
        norms: dict[str, float] = {}
        for host, some in evidence.progress.track(by_host.items(), "nuclear norms", len(by_host)):
            measured = evidence.journal.once(
                f"{key} {host}", partial(self._measure, evidence, some, choices)
            )
            for module, (norm, errors) in zip(some, measured, strict=True):
                for name in module.names:
                    cost[name] = [norm * error / len(module.layers) for error in errors]
                    norms[name] = norm
        table = CostTable(
            layers,
            choices,
            np.array([cost[layer.name] for layer in layers]),
            groups=tuple(module.names for module in modules),
        )
        return Sensitivity(table, {"nuclear_norm": norms})

    @torch.no_grad()
    def _measure(
        self, evidence: Evidence, modules: list[Module], choices: tuple[LayerBits, ...]
    ) -> list[tuple[float, list[float]]]:
        """Norm, and error at every width, of the modules of one host."""
        evidence.fits.prefetch(
            ((name, bits) for module in modules for name in module.names for bits in choices),
            (
                (site.name, bits.activation, bits.activation)
                for module in modules
                for site in module.products
                for bits in choices
            ),
        )
        norms = [0.0] * len(modules)
        batches: list[_Seen] = []
        images = 0
        for seen, count in _passes(evidence, modules, self.images):
            for i, module in enumerate(modules):
                norms[i] += count * _norm_of(module, seen, count)
            seen.maps.clear()
            batches.append(seen)
            images += count
        return [
            (
                norm / images,
                [_error_of(evidence, module, bits, batches) / images for bits in choices],
            )
            for norm, module in zip(norms, modules, strict=True)
        ]


def _norm_of(module: Module, seen: _Seen, images: int) -> float:
    maps = [seen.maps[site.name] for site in module.products if site.name in seen.maps]
    if not maps:
        maps = [_per_image(seen.outputs[name], images) for name in module.outputs]
    return sum(float(nuclear_norms(some.double()).mean()) for some in maps) / len(maps)


def _per_image(output: Tensor, images: int) -> Tensor:
    """Outputs as (images, tokens, channels): windows and rows of one image are joined."""
    return output.reshape(images, -1, output.shape[-1])


def _error_of(evidence: Evidence, module: Module, bits: LayerBits, batches: list[_Seen]) -> float:
    """Squared error of the module's output with all of its sites at those bits."""
    fits = evidence.fits
    products = [fits.matmul(site, bits.activation, bits.activation) for site in module.products]
    quantized = assemble(
        evidence.model, [fits.layer(name, bits) for name in module.names], products
    )
    host = quantized.get_submodule(module.host)
    total = 0.0
    seen = _Seen()
    handles = _watch(quantized, module.host, module.outputs, [], seen)
    try:
        for batch in batches:
            host(*batch.arguments, **batch.named)
            for name in module.outputs:
                error = seen.outputs[name] - batch.outputs[name]
                total += float(error.square().sum(dtype=torch.float64))
    finally:
        for handle in handles:
            handle.remove()
    return total

"""Accuracy of the float model with some of its layers quantized, on the evaluation images."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lampq.config import RunConfig
from lampq.evaluate import PrefixCache, top1
from lampq.methods import FitCache
from lampq.quant.modules import assemble
from lampq.reproduce.lab import Lab
from lampq.sharing import sharing_key
from lampq.types import LayerBits, LayerRole, LayerSpec, ModelGraph

Widths = Mapping[str, LayerBits]
ROLES = ("qkv", "proj", "fc1", "fc2")
MODULES = {"MSA": (LayerRole.QKV, LayerRole.PROJ), "MLP": (LayerRole.FC1, LayerRole.FC2)}


def members(graph: ModelGraph) -> dict[int, dict[str, tuple[LayerSpec, ...]]]:
    """For each block its components: itself, its modules and its layers, by name."""
    found: dict[int, dict[str, tuple[LayerSpec, ...]]] = {}
    for block in sorted({layer.block for layer in graph.allocatable}):
        own = [layer for layer in graph.allocatable if layer.block == block]
        parts = {"block": tuple(own)}
        for name, roles in MODULES.items():
            parts[name] = tuple(layer for layer in own if layer.role in roles)
        for role in ROLES:
            parts[role] = tuple(layer for layer in own if layer.role == role)
        found[block] = {name: layers for name, layers in parts.items() if layers}
    return found


class Probing:
    """Accuracies by the widths of single layers; all other layers and all products are in float.

    Models that agree up to a block run from there on. Each accuracy is computed once.
    """

    def __init__(self, lab: Lab, config: RunConfig) -> None:
        self.lab, self.fits = lab, lab.fits(config)
        self._about = f"{len(lab.scored)} {sharing_key(config)}"
        self._caches: dict[str, PrefixCache] = {}

    @property
    def graph(self) -> ModelGraph:
        """The sites of the model."""
        return self.fits.graph

    def accuracy(self, base: Widths, changed: Widths) -> float:
        """Top-1 in percent of the base with some layers at other widths."""
        key = f"probe {self._about} {_text(base)} + {_text(changed)}"
        return self.lab.journal.once(key, lambda: self._measure(base, changed))

    def _measure(self, base: Widths, changed: Widths) -> float:
        labels = self.lab.scored.require_labels("an accuracy")
        cache = self._cache(base)
        if not changed:
            return top1(cache.logits, labels)
        with torch.no_grad():
            model = quantized_layers(self.fits, {**base, **changed})
            first = min(self.graph.layer(name).block for name in changed)
            return top1(cache.predict(model, first), labels)

    def _cache(self, base: Widths) -> PrefixCache:
        text = _text(base)
        if text not in self._caches:
            self._caches.clear()  # one at a time: they hold the inputs of all blocks
            model = quantized_layers(self.fits, base)
            self._caches[text] = PrefixCache(model, self.graph.blocks, self.lab.scored)
        return self._caches[text]


def quantized_layers(fits: FitCache, widths: Widths) -> torch.nn.Module:
    """The float model with these layers quantized, and nothing else."""
    fits.prefetch(widths.items())
    return assemble(fits.model, [fits.layer(name, bits) for name, bits in widths.items()])


def at(layers: tuple[LayerSpec, ...], bits: int) -> dict[str, LayerBits]:
    """These layers at one width."""
    return {layer.name: LayerBits(bits, bits) for layer in layers}


def _text(widths: Widths) -> str:
    return " ".join(f"{name}={bits}" for name, bits in sorted(widths.items())) or "float"

"""One pass of the float model over a few images: what every site sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.data import Samples
from lampq.errors import GraphError
from lampq.types import ModelGraph


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Float inputs of one layer, (tokens, channels)."""

    inputs: Tensor


@dataclass(frozen=True, slots=True)
class MatmulStats:
    """Float operands of one matmul, (maps, heads, rows, columns)."""

    left: Tensor
    right: Tensor


Stats = LayerStats | MatmulStats


def tokens_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs of a linear layer or of a patch embedding, as (tokens, channels)."""
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(inputs, module.kernel_size, stride=module.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return inputs.flatten(0, -2)


@contextmanager
def recording(model: nn.Module, names: list[str]) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """Inputs of the named modules in the last forward pass, while the context lasts."""
    seen: dict[str, tuple[Tensor, ...]] = {}

    def record(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen[name] = tuple(arguments)

        return model.get_submodule(name).register_forward_pre_hook(keep)

    handles = [record(name) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _draw(count: int, keep: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=generator)[:keep].sort().values


@torch.no_grad()
def collect(
    model: nn.Module,
    graph: ModelGraph,
    samples: Samples,
    *,
    max_tokens: int = 8192,
    max_maps: int = 32,
    batch: int = 16,
    seed: int = 0,
) -> Mapping[str, Stats]:
    """Inputs of every site, at most ``max_tokens`` tokens and ``max_maps`` attention maps each."""
    layers = {layer.name: model.get_submodule(layer.name) for layer in graph.layers}
    matmuls = [site.name for site in graph.matmuls]
    kept: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in (*layers, *matmuls)}
    with recording(model, list(kept)) as seen:
        before = 0
        for number, (images, _) in enumerate(samples.batches(batch)):
            seen.clear()
            model(images)
            after = before + len(images)
            quotas = [
                limit * after // len(samples) - limit * before // len(samples)
                for limit in (max_tokens, max_maps)
            ]
            before = after
            generator = torch.Generator().manual_seed(seed + number)
            for name in kept:
                if name not in seen:
                    raise GraphError(f"layer {name!r} is never called by the model's forward pass")
                if name in layers:
                    tokens = tokens_of(layers[name], seen[name][0])
                    index = _draw(len(tokens), quotas[0], generator)
                    kept[name].append((tokens[index],))
                else:
                    left, right = seen[name]
                    index = _draw(len(left), quotas[1], generator)
                    kept[name].append((left[index], right[index]))
    stats: dict[str, Stats] = {}
    for name, parts in kept.items():
        joined = [torch.cat(column) for column in zip(*parts, strict=True)]
        stats[name] = LayerStats(joined[0]) if name in layers else MatmulStats(*joined)
    return stats

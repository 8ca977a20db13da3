"""One pass of the float model over a few images: what every site sees, and what depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

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
TokenDraw = Literal["uniform", "fisher"]


def tokens_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs of a linear layer or of a patch embedding, as (tokens, channels)."""
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(inputs, module.kernel_size, stride=module.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return inputs.flatten(0, -2)


@contextmanager
def _hooked(
    names: list[str], attach: Callable[[str], torch.utils.hooks.RemovableHandle]
) -> Iterator[None]:
    """Hooks on the named modules, removed at the end."""
    handles = [attach(name) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recording(model: nn.Module, names: list[str]) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """Inputs of the named modules in the last forward pass, while the context lasts."""
    seen: dict[str, tuple[Tensor, ...]] = {}

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen[name] = tuple(arguments)

        return model.get_submodule(name).register_forward_pre_hook(keep)

    with _hooked(names, attach):
        yield seen


@contextmanager
def recording_gradients(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Gradients at the outputs of the named modules in the last backward pass."""
    seen: dict[str, Tensor] = {}

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, _arguments: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: seen.__setitem__(name, gradient)
                )

        return model.get_submodule(name).register_forward_hook(keep)

    with _hooked(names, attach):
        yield seen


def drawn_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One label per image, drawn from the model's own distribution."""
    probabilities = logits.detach().double().softmax(dim=1).cpu()
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1).to(logits.device)


def backward(
    model: nn.Module, images: Tensor, generator: torch.Generator, labels: Tensor | None = None
) -> None:
    """Back-propagate the log-likelihood of the labels, or of labels drawn from the model.

    The loss is summed over images, so the gradients of different images do not mix.
    """
    with torch.enable_grad():
        logits = model(images.clone().requires_grad_())
        answer = drawn_labels(logits, generator) if labels is None else labels
        F.cross_entropy(logits, answer, reduction="sum").backward()  # type: ignore[no-untyped-call]


def token_weights(module: nn.Module, gradient: Tensor, images: int) -> Tensor:
    """How often each token should be drawn, (tokens,).

    One half of the weight is even, the other is the token's share of its image's squared output
    gradient: where the class token alone decides, as in the last blocks of a ViT, it gets most of
    that although it is one of hundreds.
    """
    if isinstance(module, nn.Conv2d):
        gradient = gradient.flatten(2).transpose(1, 2)
    power = gradient.square().sum(dim=-1).reshape(images, -1)
    share = power / power.sum(dim=1, keepdim=True).clamp_min(1e-30)
    return (share + 1 / share.shape[1]).flatten()


def _draw(
    count: int, keep: int, generator: torch.Generator, weights: Tensor | None = None
) -> Tensor:
    """Numbers of the kept ones: without replacement, or with it by weight."""
    if weights is None:
        return torch.randperm(count, generator=generator)[:keep].sort().values
    if not keep:
        return torch.zeros(0, dtype=torch.long)
    return weights.multinomial(keep, replacement=True, generator=generator).sort().values


@torch.no_grad()
def collect(
    model: nn.Module,
    graph: ModelGraph,
    samples: Samples,
    *,
    tokens: TokenDraw = "uniform",
    max_tokens: int = 8192,
    max_maps: int = 32,
    batch: int = 16,
    seed: int = 0,
) -> Mapping[str, Stats]:
    """Inputs of every site, at most ``max_tokens`` tokens and ``max_maps`` attention maps each.

    ``tokens``: "fisher" draws tokens as often as the log-likelihood depends on them, so that a
    method that minimises a mean error over tokens minimises what matters.
    """
    layers = {layer.name: model.get_submodule(layer.name) for layer in graph.layers}
    matmuls = [site.name for site in graph.matmuls]
    names = [*layers, *matmuls]
    kept: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in names}
    with recording(model, names) as seen, recording_gradients(model, list(layers)) as slopes:
        before = 0
        for number, (images, _) in enumerate(samples.batches(batch)):
            seen.clear()
            slopes.clear()
            generator = torch.Generator().manual_seed(seed + number)
            if tokens == "fisher":
                backward(model, images, generator)
            else:
                model(images)
            after = before + len(images)
            quotas = [
                limit * after // len(samples) - limit * before // len(samples)
                for limit in (max_tokens, max_maps)
            ]
            before = after
            for name in names:
                if name not in seen:
                    raise GraphError(f"layer {name!r} is never called by the model's forward pass")
                if name in layers:
                    rows = tokens_of(layers[name], seen[name][0].detach())
                    weights = None
                    if name in slopes:
                        weights = token_weights(layers[name], slopes[name], len(images))
                    index = _draw(len(rows), quotas[0], generator, weights)
                    kept[name].append((rows[index],))
                else:
                    left, right = (operand.detach() for operand in seen[name])
                    index = _draw(len(left), quotas[1], generator)
                    kept[name].append((left[index], right[index]))
            # the last batch holds its whole graph
            seen.clear()
            slopes.clear()
    stats: dict[str, Stats] = {}
    for name in names:
        # joined one by one, so that no more than one site is in memory twice
        joined = [torch.cat(column) for column in zip(*kept.pop(name), strict=True)]
        stats[name] = LayerStats(joined[0]) if name in layers else MatmulStats(*joined)
    return stats

"""One pass of the float model over a few images: what every site sees, and what depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.data import Samples
from lampq.errors import GraphError
from lampq.types import ModelGraph, SumSpec


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block of the float model on a few images: arguments, output, gradient at the output.

    ``module`` is the model's own: copy it before changing anything.
    """

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Tensor
    gradient: Tensor


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Float inputs of one layer, (tokens, channels).

    ``gradients`` of the log-likelihood at its output, (tokens, outputs), and the view of its block
    are there if they were asked for.
    """

    inputs: Tensor
    gradients: Tensor | None = None
    block: BlockView | None = None


@dataclass(frozen=True, slots=True)
class MatmulStats:
    """Float operands of one matmul, (maps, heads, rows, columns).

    ``gradients`` at the product and the view of the block are there if they were asked for.
    """

    left: Tensor
    right: Tensor
    gradients: Tensor | None = None
    block: BlockView | None = None


Stats = LayerStats | MatmulStats
TokenDraw = Literal["uniform", "fisher"]


def tokens_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs of a linear layer or of a patch embedding, as (tokens, channels)."""
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(inputs, module.kernel_size, stride=module.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return inputs.flatten(0, -2)


def sum_tokens(operands: tuple[Tensor, ...]) -> Tensor:
    """The values of a residual sum, as (tokens, channels)."""
    return (operands[0] + operands[1]).detach().flatten(0, -2)


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
def recording_outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Outputs of the named modules in the last forward pass, of those that give a tensor."""
    seen: dict[str, Tensor] = {}

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, _arguments: tuple[Tensor, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                seen[name] = output

        return model.get_submodule(name).register_forward_hook(keep)

    with _hooked(names, attach):
        yield seen


@contextmanager
def recording_gradients(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Gradients at the outputs of the named modules in the last backward pass."""
    seen: dict[str, Tensor] = {}

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, _arguments: tuple[Tensor, ...], output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: seen.__setitem__(name, gradient)
                )

        return model.get_submodule(name).register_forward_hook(keep)

    with _hooked(names, attach):
        yield seen


class ReachedError(Exception):
    """Ends a forward pass at the wanted module."""


@torch.no_grad()
def arguments_of(
    model: nn.Module, name: str, inputs: Tensor, *rest: Any, **named: Any
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What the model gives to one of its modules, without running the rest of it."""
    found: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

    def stop(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found.append((arguments, keywords))
        raise ReachedError

    handle = model.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(inputs, *rest, **named)
    except ReachedError:
        pass
    finally:
        handle.remove()
    return found[0]


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


def block_views(
    model: nn.Module, graph: ModelGraph, images: Tensor, generator: torch.Generator
) -> dict[int, BlockView]:
    """The blocks of the model on these images, by number; without those that give no tensor.

    The labels are drawn from the model.
    """
    calls: dict[str, tuple[tuple[Any, ...], Mapping[str, Any], Tensor]] = {}
    names = list(graph.blocks)

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(
            _module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
        ) -> None:
            calls[name] = (arguments, keywords, output)

        return model.get_submodule(name).register_forward_hook(keep, with_kwargs=True)

    with _hooked(names, attach), recording_gradients(model, names) as slopes:
        backward(model, images, generator)
    views = {}
    for number, name in enumerate(names):
        if name not in slopes:
            continue
        arguments, keywords, output = calls[name]
        views[number] = BlockView(
            name=name,
            module=model.get_submodule(name),
            arguments=tuple(_detached(value) for value in arguments),
            keywords={key: _detached(value) for key, value in keywords.items()},
            output=output.detach(),
            gradient=slopes[name],
        )
    return views


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def token_gradients(module: nn.Module, gradient: Tensor) -> Tensor:
    """Gradients at the output of a linear layer or patch embedding, as (tokens, outputs)."""
    if isinstance(module, nn.Conv2d):
        return gradient.flatten(2).transpose(1, 2).flatten(0, 1)
    return gradient.flatten(0, -2)


def _operands(module: nn.Module | None, seen: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a layer (its tokens) or a matmul (its operands) was given."""
    given = tuple(operand.detach() for operand in seen)
    return given if module is None else (tokens_of(module, given[0]),)


def _output_gradients(
    module: nn.Module | None,
    operands: tuple[Tensor, ...],
    gradient: Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    """Gradients at the output of a site, one row per token or map; zero if nothing depends on it.

    ``weights``, how often each token is drawn, are divided out.
    """
    if gradient is None and module is None:
        return torch.zeros_like(operands[0] @ operands[1])
    if gradient is None:
        assert isinstance(module, nn.Linear | nn.Conv2d), "discovery names linear layers only"
        return operands[0].new_zeros(len(operands[0]), len(module.weight))
    if module is None:
        return gradient
    rows = token_gradients(module, gradient)
    return rows if weights is None else rows / (weights / weights.mean()).sqrt()[:, None]


def token_weights(module: nn.Module, gradient: Tensor, images: int) -> Tensor:
    """How often each token should be drawn, (tokens,).

    One half of the weight is even, the other is the token's share of its image's squared output
    gradient: where the class token alone decides, as in the last blocks of a ViT, it gets most of
    that although it is one of hundreds.
    """
    power = token_gradients(module, gradient).square().sum(dim=-1).reshape(images, -1)
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


class _Rows:
    """Columns of rows that come piece by piece, each in one array from the start.

    Small pieces between the large arrays of a pass would keep their memory from being given back.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0
        self.arrays: list[Tensor] = []

    def append(self, pieces: tuple[Tensor, ...]) -> None:
        if not self.arrays:
            self.arrays = [piece.new_empty(self.limit, *piece.shape[1:]) for piece in pieces]
        after = self.count + len(pieces[0])
        for array, piece in zip(self.arrays, pieces, strict=True):
            array[self.count : after] = piece
        self.count = after

    def columns(self) -> list[Tensor]:
        return [array[: self.count] for array in self.arrays]


@torch.no_grad()
def collect(
    model: nn.Module,
    graph: ModelGraph,
    samples: Samples,
    *,
    tokens: TokenDraw = "uniform",
    gradients: bool = False,
    block_images: int = 0,
    sums: tuple[SumSpec, ...] = (),
    max_tokens: int = 8192,
    max_maps: int = 32,
    batch: int = 16,
    seed: int = 0,
) -> Mapping[str, Stats]:
    """Inputs of every site, at most ``max_tokens`` tokens and ``max_maps`` attention maps each.

    ``tokens``: "fisher" draws tokens as often as the log-likelihood depends on them, so that a
    method that minimises a mean error over tokens minimises what matters.
    ``gradients`` keeps the gradient of the log-likelihood of labels drawn from the model, at the
    kept tokens and maps. Where tokens are drawn by weight it is divided by the root of the weight,
    so that sums of its squares stand for sums over all tokens.
    ``block_images`` is how many images the views of the blocks have; with 0 there are no views.
    ``sums`` are the residual sums whose values are wanted too; their tokens are drawn evenly.
    """
    layers = {layer.name: model.get_submodule(layer.name) for layer in graph.layers}
    names = [*layers, *(site.name for site in graph.matmuls)]
    sloped = names if gradients else list(layers)
    added = [site.name for site in sums]
    limits = {name: max_tokens if name in layers else max_maps for name in names}
    limits |= dict.fromkeys(added, max_tokens)
    kept = {name: _Rows(limit) for name, limit in limits.items()}
    with recording(model, [*names, *added]) as seen, recording_gradients(model, sloped) as slopes:
        before = 0
        for number, (images, _) in enumerate(samples.batches(batch)):
            seen.clear()
            slopes.clear()
            generator = torch.Generator().manual_seed(seed + number)
            if gradients or tokens == "fisher":
                backward(model, images, generator)
            else:
                model(images)
            after = before + len(images)
            whole = len(samples)
            quotas = {n: k * after // whole - k * before // whole for n, k in limits.items()}
            for name in names:
                if name not in seen:
                    raise GraphError(f"layer {name!r} is never called by the model's forward pass")
                module, slope = layers.get(name), slopes.get(name)
                parts = _operands(module, seen[name])
                weights = None
                if tokens == "fisher" and module is not None and slope is not None:
                    weights = token_weights(module, slope, len(images))
                index = _draw(len(parts[0]), quotas[name], generator, weights)
                if gradients:
                    parts += (_output_gradients(module, parts, slope, weights),)
                kept[name].append(tuple(part[index] for part in parts))
            for name in added:
                total = sum_tokens(seen[name])
                kept[name].append((total[_draw(len(total), quotas[name], generator)],))
            before = after
            # the last batch holds its whole graph
            seen.clear()
            slopes.clear()
    views: dict[int, BlockView] = {}
    if block_images:
        few = samples.inputs(slice(0, block_images))
        views = block_views(model, graph, few, torch.Generator().manual_seed(seed))
    joined = {name: rows.columns() for name, rows in kept.items()}

    def about(name: str, block: int) -> tuple[Tensor | None, BlockView | None]:
        return joined[name][-1] if gradients else None, views.get(block)

    stats: dict[str, Stats] = {}
    for layer in graph.layers:
        stats[layer.name] = LayerStats(joined[layer.name][0], *about(layer.name, layer.block))
    for site in graph.matmuls:
        left, right = joined[site.name][:2]
        stats[site.name] = MatmulStats(left, right, *about(site.name, site.block))
    for name in added:
        stats[name] = LayerStats(joined[name][0])
    return stats

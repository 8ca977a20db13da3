"""One pass of the float model over a few images: what every site sees, and what depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lampq.data import AnySamples
from lampq.errors import DataError, GraphError
from lampq.hooks import Call, hooked, recording_calls, recording_gradients
from lampq.passes import CLASSIFIER, Passes, backward
from lampq.progress import Progress
from lampq.tokens import (
    count_tokens,
    drawn,
    first_tokens,
    outputs_of,
    picked_tokens,
    rows_at_most,
    sum_tokens,
    token_gradients,
    token_weights,
)
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
    are there if they were asked for. ``first`` tells which tokens are of the prefix, (tokens,), in
    models that have one.
    """

    inputs: Tensor
    gradients: Tensor | None = None
    block: BlockView | None = None
    first: Tensor | None = None


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


def block_views(
    model: nn.Module,
    graph: ModelGraph,
    images: Any,
    generator: torch.Generator,
    known: Any = None,
    passes: Passes = CLASSIFIER,
) -> dict[int, BlockView]:
    """The blocks of the model on these images, by number; without those that give no tensor.

    The labels of a classifier are drawn from the model.
    """
    calls: dict[str, tuple[tuple[Any, ...], Mapping[str, Any], Tensor]] = {}
    names = list(graph.blocks)

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(
            _module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
        ) -> None:
            calls[name] = (arguments, keywords, output)

        return model.get_submodule(name).register_forward_hook(keep, with_kwargs=True)

    with hooked(names, attach), recording_gradients(model, names) as slopes:
        backward(model, images, generator, known, passes=passes)
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
    samples: AnySamples,
    *,
    tokens: TokenDraw = "uniform",
    gradients: bool = False,
    block_images: int = 0,
    sums: tuple[SumSpec, ...] = (),
    max_tokens: int = 8192,
    max_maps: int = 32,
    batch: int = 16,
    seed: int = 0,
    passes: Passes = CLASSIFIER,
    progress: Progress | None = None,
) -> Mapping[str, Stats]:
    """Inputs of every site, at most ``max_tokens`` tokens and ``max_maps`` attention maps each.

    ``tokens``: "fisher" draws tokens as often as the log-likelihood depends on them, so that a
    method that minimises a mean error over tokens minimises what matters.
    ``gradients`` keeps the gradient of the log-likelihood of labels drawn from the model, at the
    kept tokens and maps. Where tokens are drawn by weight it is divided by the root of the weight,
    so that sums of its squares stand for sums over all tokens.
    ``block_images`` is how many images the views of the blocks have; with 0 there are no views.
    ``sums`` are the residual sums whose values are wanted too; their tokens are drawn evenly.
    A site that is called several times in a pass has the tokens of all calls.
    """
    layers = {layer.name: model.get_submodule(layer.name) for layer in graph.layers}
    prefixes = {layer.name: layer.prefix for layer in graph.layers}
    names = [*layers, *(site.name for site in graph.matmuls)]
    added = [site.name for site in sums]
    limits = {name: max_tokens if name in layers else max_maps for name in names}
    limits |= {name: rows_at_most(max_tokens, module) for name, module in layers.items()}
    limits |= dict.fromkeys(added, max_tokens)
    kept = {name: _Rows(limit) for name, limit in limits.items()}
    sloped = gradients or tokens == "fisher"

    def summed(name: str, gradient: Tensor) -> Tensor | None:
        """What weighs tokens, where nothing else of the gradients is needed."""
        module = layers.get(name)
        return None if module is None else _power(token_gradients(module, gradient))

    kept_of_gradients = (lambda _name, gradient: gradient) if gradients else summed
    with recording_calls(model, [*names, *added], kept_of_gradients) as calls:
        before, size = 0, passes.at_once(batch)
        batches = (progress or Progress()).track(
            samples.batches(size), "inputs of layers", -(-len(samples) // size)
        )
        for number, (images, known) in enumerate(batches):
            calls.clear()
            generator = torch.Generator().manual_seed(seed + number)
            if sloped:
                backward(model, images, generator, known, passes=passes)
            else:
                passes.forward(model, images, known)
            after = before + len(images)
            whole = len(samples)
            quotas = {n: k * after // whole - k * before // whole for n, k in limits.items()}
            for name in names:
                if name not in calls:
                    raise GraphError(f"layer {name!r} is never called by the model's forward pass")
                draw = _SiteDraw(layers.get(name), calls.pop(name), prefixes.get(name, 0))
                by_weight = len(images) if tokens == "fisher" else 0
                kept[name].append(draw.rows(quotas[name], generator, by_weight, sloped=gradients))
            for name in added:
                total = sum_tokens(calls.pop(name)[0].operands)
                kept[name].append((total[drawn(len(total), quotas[name], generator)],))
            before = after
    views: dict[int, BlockView] = {}
    if block_images:
        few, known = next(iter(samples.batches(block_images)))
        generator = torch.Generator().manual_seed(seed)
        views = block_views(model, graph, few, generator, known, passes)
    return _statistics(graph, added, kept, views, sloped=gradients)


def _power(gradients: Tensor) -> Tensor:
    """Squared norm of each row."""
    return gradients.square().sum(dim=-1)


@dataclass(frozen=True, slots=True)
class _SiteDraw:
    """What a layer, or a matmul (no module), was given in one pass."""

    module: nn.Module | None
    calls: list[Call]
    prefix: int

    def rows(
        self, keep: int, generator: torch.Generator, weighed: int, *, sloped: bool
    ) -> tuple[Tensor, ...]:
        """Some of its tokens or maps; ``sloped`` adds the gradients at its output.

        Tokens come with whether they are of the prefix.
        ``weighed`` is the number of images if tokens are drawn by weight, else 0.
        """
        if self.module is None:
            return self._maps(keep, generator, sloped=sloped)
        inputs = [call.operands[0] for call in self.calls]
        count = sum(count_tokens(self.module, one) for one in inputs)
        slopes = self._slopes(self.module, whole=sloped) if weighed or sloped else None
        weights = None
        if weighed and slopes is not None:
            weights = token_weights(_power(slopes) if sloped else slopes, weighed)
        index = drawn(count, keep, generator, weights)
        rows = picked_tokens(self.module, inputs, index)
        first = first_tokens(self.module, inputs, index, self.prefix)
        if not sloped:
            return rows, first
        if slopes is None:
            return rows, first, rows.new_zeros(len(rows), outputs_of(self.module))
        if weights is not None:
            slopes = slopes / (weights / weights.mean()).sqrt()[:, None]
        return rows, first, slopes[index]

    def _slopes(self, module: nn.Module, *, whole: bool) -> Tensor | None:
        """Gradients at the output, (tokens, outputs), or what was kept of them, (tokens,).

        None if nothing depends on the site.
        """
        found = [call.gradient for call in self.calls if call.gradient is not None]
        if len(found) < len(self.calls):
            return None
        return torch.cat([token_gradients(module, one) if whole else one for one in found])

    def _maps(self, keep: int, generator: torch.Generator, *, sloped: bool) -> tuple[Tensor, ...]:
        (call,) = self.calls
        left, right = call.operands
        index = drawn(len(left), keep, generator)
        parts = (left[index], right[index])
        if not sloped:
            return parts
        if call.gradient is None:
            return *parts, torch.zeros_like(parts[0] @ parts[1])
        return *parts, call.gradient[index]


def _statistics(
    graph: ModelGraph,
    added: list[str],
    kept: Mapping[str, _Rows],
    views: Mapping[int, BlockView],
    *,
    sloped: bool,
) -> dict[str, Stats]:
    for name, rows in kept.items():
        if not rows.count:
            raise DataError(f"no calibration image gives {name!r} anything to see")
    joined = {name: rows.columns() for name, rows in kept.items()}

    def about(name: str, block: int) -> tuple[Tensor | None, BlockView | None]:
        return joined[name][-1] if sloped else None, views.get(block)

    stats: dict[str, Stats] = {}
    for layer in graph.layers:
        inputs, first = joined[layer.name][:2]
        known = first if layer.prefix else None
        stats[layer.name] = LayerStats(inputs, *about(layer.name, layer.block), known)
    for site in graph.matmuls:
        left, right = joined[site.name][:2]
        stats[site.name] = MatmulStats(left, right, *about(site.name, site.block))
    for name in added:
        stats[name] = LayerStats(joined[name][0])
    return stats

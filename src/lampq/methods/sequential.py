"""Statistics of a model that is quantized site by site: each site sees what the ones before give.

RepQ-ViT is calibrated in this way. Its fits then depend on the widths upstream, which would have to
be fitted again at every change of a plan. Here the statistics are collected once, with everything
upstream at the target width, so that a fit still depends on its own width alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lampq.calibrate import LayerStats, MatmulStats, Stats
from lampq.data import AnySamples
from lampq.errors import GraphError
from lampq.hooks import ReachedError
from lampq.methods.base import LinearView, Method, SiteWidths, SumMethod, sums_of
from lampq.passes import CLASSIFIER, Passes
from lampq.progress import Progress
from lampq.quant.modules import QuantMatMul, QuantSum, install_, replace_module
from lampq.tokens import (
    count_tokens,
    drawn,
    first_tokens,
    picked_tokens,
    rows_at_most,
    sum_tokens,
)
from lampq.types import BitPlan, ModelGraph

MAX_IMAGES = 128
Run = Callable[[nn.Module], None]


def execution_order(model: nn.Module, names: list[str], run: Run) -> dict[str, int]:
    """The named modules in the order in which a pass first calls them, and how often it does."""
    called: list[str] = []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, _arguments, name=name: called.append(name)
        )
        for name in names
    ]
    try:
        run(model)
    finally:
        for handle in handles:
            handle.remove()
    for name in names:
        if name not in called:
            raise GraphError(f"layer {name!r} is never called by the model's forward pass")
    return {name: called.count(name) for name in called}


def calls_of(model: nn.Module, name: str, run: Run, count: int) -> list[tuple[Tensor, ...]]:
    """What a module is given in its first calls of a pass, without running the rest of it."""
    found: list[tuple[Tensor, ...]] = []

    def keep(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        found.append(arguments)
        if len(found) == count:
            raise ReachedError

    handle = model.get_submodule(name).register_forward_pre_hook(keep)
    try:
        run(model)
    except ReachedError:
        pass
    finally:
        handle.remove()
    return found


@torch.no_grad()
def collect_in_order(
    model: nn.Module,
    graph: ModelGraph,
    samples: AnySamples,
    method: Method,
    plan: BitPlan,
    sites: SiteWidths,
    *,
    max_tokens: int = 8192,
    max_maps: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
    passes: Passes = CLASSIFIER,
) -> Mapping[str, Stats]:
    """Inputs of every site when the sites before it are quantized by the method and the plan.

    At most MAX_IMAGES are looked at: they go through all sites before the one in question for each
    site anew.
    """
    quantized = copy.deepcopy(model)
    layers = {layer.name: layer for layer in graph.layers}
    sums = {site.name: site for site in sums_of(graph, method)}
    matmuls = {site.name: site for site in graph.matmuls}
    generator = torch.Generator().manual_seed(seed)
    stats: dict[str, Stats] = {}
    one_batch = next(iter(samples.batches(1)))
    order = execution_order(
        model, [*layers, *matmuls, *sums], lambda one: passes.forward(one, *one_batch)
    )
    for name in (progress or Progress()).track(order, "statistics in order", len(order)):
        module = model.get_submodule(name) if name in layers else None
        most = max_maps if name in matmuls else max_tokens
        if module is not None:
            most = rows_at_most(max_tokens, module)
        pieces = [
            _drawn_rows(
                module,
                calls_of(quantized, name, run, order[name]),
                keep,
                generator,
                flat=name in sums,
                prefix=layers[name].prefix if name in layers else 0,
            )
            for keep, run in _quotas(samples, most, passes)
        ]
        columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
        if module is not None:
            spec = layers[name]
            first = columns[1] if spec.prefix else None
            stats[name] = inputs = LayerStats(columns[0], first=first)
            bits = plan.get(name, sites.of_layer(spec))
            install_(quantized, method.fit(LinearView.of(model, spec), bits, inputs))
        elif name in sums:
            stats[name] = inputs = LayerStats(sum_tokens(tuple(columns)))
            assert isinstance(method, SumMethod), "only these have sums"
            added = sums[name]
            total = method.fit_sum(added, sites.of_sum(added, plan), inputs)
            replace_module(quantized, name, QuantSum(total))
        else:
            stats[name] = operands = MatmulStats(columns[0], columns[1])
            site = matmuls[name]
            fit = method.fit_matmul(site, *sites.of_matmul(site, plan), operands)
            replace_module(quantized, name, QuantMatMul(fit))
    return stats


def _quotas(samples: AnySamples, most: int, passes: Passes) -> Iterator[tuple[int, Run]]:
    """The batches of the first images: how many rows to keep of each, and how it is run."""
    whole, before = min(len(samples), MAX_IMAGES), 0
    for images, known in samples.batches(passes.at_once(MAX_IMAGES)):
        after = before + len(images)

        def run(model: nn.Module, images: Any = images, known: Any = known) -> None:
            passes.forward(model, images, known)

        yield most * after // whole - most * before // whole, run
        before = after
        if before >= whole:
            return


def _drawn_rows(
    module: nn.Module | None,
    calls: list[tuple[Tensor, ...]],
    keep: int,
    generator: torch.Generator,
    *,
    flat: bool,
    prefix: int,
) -> tuple[Tensor, ...]:
    """Some tokens of a layer or of the operands of a sum (``flat``), or some maps of a product.

    Those of a layer come with whether they are among the first ``prefix`` ones of their image.
    """
    if module is not None:
        inputs = [given[0] for given in calls]
        count = sum(count_tokens(module, one) for one in inputs)
        index = drawn(count, keep, generator)
        return picked_tokens(module, inputs, index), first_tokens(module, inputs, index, prefix)
    (operands,) = calls
    rows = [part.flatten(0, -2) if flat else part for part in operands[:2]]
    index = drawn(len(rows[0]), keep, generator)
    return tuple(part[index] for part in rows)

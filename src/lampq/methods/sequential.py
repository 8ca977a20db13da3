"""Statistics of a model that is quantized site by site: each site sees what the ones before give.

RepQ-ViT is calibrated in this way. Its fits then depend on the widths upstream, which would have to
be fitted again at every change of a plan. Here the statistics are collected once, with everything
upstream at the target width, so that a fit still depends on its own width alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lampq.calibrate import LayerStats, MatmulStats, Stats, arguments_of, tokens_of
from lampq.data import Samples
from lampq.errors import GraphError
from lampq.methods.base import LinearView, Method, SiteWidths
from lampq.progress import Progress
from lampq.quant.modules import QuantMatMul, install_, replace_module
from lampq.types import BitPlan, ModelGraph

MAX_IMAGES = 128


def execution_order(model: nn.Module, names: list[str], example: Tensor) -> list[str]:
    """The named modules in the order in which a forward pass calls them."""
    called: list[str] = []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, _arguments, name=name: called.append(name)
        )
        for name in names
    ]
    try:
        model(example)
    finally:
        for handle in handles:
            handle.remove()
    for name in names:
        if name not in called:
            raise GraphError(f"layer {name!r} is never called by the model's forward pass")
    return list(dict.fromkeys(called))


@torch.no_grad()
def collect_in_order(
    model: nn.Module,
    graph: ModelGraph,
    samples: Samples,
    method: Method,
    plan: BitPlan,
    sites: SiteWidths,
    *,
    max_tokens: int = 8192,
    max_maps: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Mapping[str, Stats]:
    """Inputs of every site when the sites before it are quantized by the method and the plan.

    At most MAX_IMAGES are looked at: all of them are held in memory, and go through all sites
    before the one in question for each site anew.
    """
    quantized = copy.deepcopy(model)
    layers = {layer.name: layer for layer in graph.layers}
    matmuls = {site.name: site for site in graph.matmuls}
    images = samples.inputs(slice(0, MAX_IMAGES))
    generator = torch.Generator().manual_seed(seed)
    stats: dict[str, Stats] = {}
    order = execution_order(model, [*layers, *matmuls], images[:1])
    for name in (progress or Progress()).track(order, "statistics in order", len(order)):
        given, _ = arguments_of(quantized, name, images)
        if name in layers:
            spec = layers[name]
            rows = tokens_of(model.get_submodule(name), given[0])
            kept = torch.randperm(len(rows), generator=generator)[:max_tokens].sort().values
            inputs = LayerStats(rows[kept])
            bits = plan.get(name, sites.edge)
            install_(quantized, method.fit(LinearView.of(model, spec), bits, inputs))
            stats[name] = inputs
        else:
            kept = torch.randperm(len(given[0]), generator=generator)[:max_maps].sort().values
            operands = MatmulStats(given[0][kept], given[1][kept])
            site = matmuls[name]
            fit = method.fit_matmul(site, *sites.of_matmul(site, plan), operands)
            replace_module(quantized, name, QuantMatMul(fit))
            stats[name] = operands
    return stats

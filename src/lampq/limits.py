"""The budget of a run: a mean width, or what deployers have: bytes of the file, bit operations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lampq.allocate import check_feasible
from lampq.artifact.checkpoint import KEY
from lampq.artifact.pack import packed_size
from lampq.config import RunConfig
from lampq.data import AnySamples
from lampq.errors import BudgetError, ConfigError
from lampq.graph.attention import MatMul
from lampq.hooks import recording_calls
from lampq.methods import FitCache
from lampq.quant.base import Quantizer
from lampq.tokens import count_tokens
from lampq.types import (
    INTEGER_BITS,
    MAX_BITS,
    BitPlan,
    Budget,
    LayerBits,
    LayerRole,
    LayerSpec,
    Limit,
    MatmulSpec,
    ModelGraph,
)

# the preprocessing that a checkpoint may carry, as JSON, and the padding of its header
HEADER_ROOM = 256
FLOAT_BITS = 32


def _site_bytes(content: bytes, digits: int) -> dict[str, int]:
    """Bytes that every site takes of a checkpoint, its entries in the header included.

    What belongs to no site is under the empty name. Offsets are counted with ``digits`` digits.
    """
    length = int.from_bytes(content[:8], "little")
    entries: dict[str, Any] = json.loads(content[8 : 8 + length])
    header = json.loads(entries.pop("__metadata__")[KEY])
    sites = {**header["layers"], **header["matmuls"], **header.get("sums", {})}
    found = dict.fromkeys(sites, 0)
    taken = 0
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        site = next((site for site in _parents(name) if site in sites), "")
        more = 2 * digits - len(str(start)) - len(str(end))
        found[site] = found.get(site, 0) + end - start + len(_line(name, entry)) + more
        taken += end - start + len(_line(name, entry))
    for site, about in sites.items():
        # quoted once more, as text inside the metadata
        size = len(json.dumps(_line(site, about))) - 2
        found[site] += size
        taken += size
    found[""] = found.get("", 0) + len(content) - taken
    return found


def _parents(name: str) -> list[str]:
    """The names of the modules that a tensor may belong to, the nearest first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _line(name: str, entry: Any) -> str:
    return json.dumps({name: entry}, separators=(",", ":"))[1:-1] + ","


def check_room(layers: tuple[LayerSpec, ...], choices: tuple[LayerBits, ...], most: int) -> None:
    """Raise if the codes of the narrowest plan alone are larger than a file may be."""
    bits = min(choice.weight for choice in choices)
    needed = sum(packed_size(layer.n_params, bits) for layer in layers)
    if needed > most:
        raise BudgetError(
            f"no assignment takes {most} bytes or less: the codes of the narrowest choices alone "
            f"take {needed}"
        )


def size_limit(
    fits: FitCache,
    write: Callable[[BitPlan], bytes],
    choices: tuple[LayerBits, ...],
    most: int,
) -> Limit:
    """The limit on the bytes of a checkpoint, everything in the file counted.

    ``write`` gives the file of a plan. What the layers take is read off the files of all uniform
    plans: a layer takes as much in any other plan.
    """
    layers = fits.graph.allocatable
    amounts: dict[tuple[str, LayerBits], int] = {}
    others: dict[str, int] = {}
    names = {layer.name for layer in layers}
    files = {bits: write(BitPlan.uniform(layers, bits)) for bits in choices}
    digits = len(str(max(map(len, files.values()))))
    for bits, content in files.items():
        taken = _site_bytes(content, digits)
        amounts.update({(name, bits): taken[name] for name in names})
        for site, size in taken.items():
            if site not in names:
                others[site] = max(size, others.get(site, 0))
    return Limit("bytes", most, amounts, sum(others.values()) + HEADER_ROOM)


def mean_within(limit: Limit, fits: FitCache, choices: tuple[LayerBits, ...]) -> float:
    """The mean width that fills a file, if nothing but codes took more or less of it."""
    layers = fits.graph.allocatable
    beside = sum(
        min(limit.amounts[layer.name, b] - packed_size(layer.n_params, b.weight) for b in choices)
        for layer in layers
    )
    room = 8 * (limit.most - limit.fixed - beside)
    return min(float(MAX_BITS), room / sum(layer.n_params for layer in layers))


@torch.no_grad()
def _multiplications(fits: FitCache, samples: AnySamples) -> dict[str, int]:
    """Multiplications of every layer and attention product for one image."""
    graph, model = fits.graph, fits.model
    layers = [layer.name for layer in graph.layers]
    products = [name for name, module in model.named_modules() if isinstance(module, MatMul)]
    with recording_calls(model, [*layers, *products]) as calls:
        model(samples.inputs(slice(0, 1)))
    counted = {}
    for layer in graph.layers:
        module: nn.Module = model.get_submodule(layer.name)
        inputs = [call.operands[0] for call in calls.get(layer.name, ())]
        counted[layer.name] = sum(count_tokens(module, x) for x in inputs) * layer.n_params
    for name in products:
        counted[name] = sum(
            call.operands[0].numel() * call.operands[1].shape[-1] for call in calls[name]
        )
    return counted


def bops_limit(
    fits: FitCache, samples: AnySamples, choices: tuple[LayerBits, ...], most: int
) -> Limit:
    """The limit on bit operations for one image: multiplications times both widths.

    Patch embedding, head and attention products are counted at their widths, and at 32 bits where
    they are not quantized. Queries, keys and values that are quantized as the output of their
    layer have its width, so that their products count with the layer. No width of a product's own
    may follow the plan.
    """
    counted = _multiplications(fits, samples)
    graph, sites = fits.graph, fits.sites
    amounts = {
        (layer.name, bits): counted[layer.name] * bits.weight * bits.activation
        for layer in graph.allocatable
        for bits in choices
    }
    fixed = 0
    for layer in graph.fixed:
        bits = sites.of_layer(layer)
        quantizer = fits.layer(layer.name, bits).input_quantizer
        inputs = FLOAT_BITS if quantizer is None else quantizer.bits
        fixed += counted[layer.name] * bits.weight * inputs
    known = {site.name: site for site in graph.matmuls}
    for name in counted.keys() - {layer.name for layer in graph.layers}:
        if name not in known:
            fixed += counted[name] * FLOAT_BITS**2
            continue
        before = _before(fits, known[name], choices[0])
        if before is None:
            fixed += counted[name] * _both_widths(fits, known[name], None)
            continue
        for bits in choices:
            output = fits.layer(before.name, bits).output_quantizer
            amounts[before.name, bits] += counted[name] * _both_widths(fits, known[name], output)
    return Limit("BOPs", most, amounts, fixed)


def _before(fits: FitCache, site: MatmulSpec, bits: LayerBits) -> LayerSpec | None:
    """The searched layer whose quantized output the operands are, if there is one."""
    attention = fits.model.get_submodule(site.name.rpartition(".")[0])
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if site.kind == "qk" and not all(m is None or isinstance(m, nn.Identity) for m in norms):
        return None
    for layer in fits.graph.allocatable:
        if (layer.block, layer.role) == (site.block, LayerRole.QKV):
            return layer if fits.layer(layer.name, bits).output_quantizer is not None else None
    return None


def _both_widths(fits: FitCache, site: MatmulSpec, output: Quantizer | None) -> int:
    """The product of the widths of both operands; ``output`` has quantized q, k and v before."""
    width = fits.sites.matmul
    assert width is not None, "checked by the configuration"
    fit = fits.matmul(site, width, width)
    before = (None if site.kind == "av" else output, output)
    grids = [
        other if own is None else own
        for own, other in zip((fit.left, fit.right), before, strict=True)
    ]
    return math.prod(FLOAT_BITS if grid is None else grid.bits for grid in grids)


def budget_of(config: RunConfig, mean_bits: float | None = None) -> Budget:
    """The budget of a configuration, or that with another mean weight width."""
    return Budget(config.bits if mean_bits is None else mean_bits, config.mean_activation_bits)


def run_budget(
    config: RunConfig,
    fits: FitCache,
    write: Callable[[BitPlan], bytes],
    samples: AnySamples,
    given: BitPlan | None,
) -> Budget:
    """The budget of a run: a mean width, or the limits that deployers have instead of it.

    ``write`` gives the file of a plan.
    """
    limits: list[Limit] = []
    layers = fits.graph.allocatable
    # a given plan may have widths that are not among the choices
    choices = tuple(sorted({*config.widths, *(given.widths if given else ())}))
    if config.target_size is not None:
        limits.append(size_limit(fits, write, choices, config.target_size))
    if config.target_bops is not None:
        limits.append(bops_limit(fits, samples, choices, config.target_bops))
    if not limits:
        return budget_of(config)
    budget = replace(budget_of(config, MAX_BITS), limits=tuple(limits))
    check_feasible(layers, config.widths, budget)
    # what the bytes leave for codes is no limit of its own: it is there to be read
    means = [mean_within(one, fits, choices) for one in limits if one.name == "bytes"]
    return replace(budget, mean_bits=means[0]) if means and means[0] > 0 else budget


def widest_uniform(graph: ModelGraph, config: RunConfig, budget: Budget) -> BitPlan:
    """The widest choice that fits the budget, for all layers."""
    plans = [BitPlan.uniform(graph.allocatable, bits) for bits in config.widths]
    within = [plan for plan in plans if budget.allows(plan)]
    if not within:
        raise BudgetError("no single choice for all layers is within every limit of the budget")
    return within[-1]


def check_widths(plan: BitPlan, config: RunConfig) -> None:
    """Raise if integer kernels are wanted for a layer that they are too narrow for."""
    for name, bits in plan.items():
        if config.profile == "speed" and max(bits.weight, bits.activation) > INTEGER_BITS:
            raise ConfigError(
                f"the plan has {bits} bits for {name!r}, and profile speed has at most "
                f"{INTEGER_BITS}"
            )

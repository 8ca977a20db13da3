"""What a run needs, checked before any image: names, weights, graph, budget, plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from lampq.allocate import ALLOCATORS, Allocator, check_feasible
from lampq.config import RunConfig
from lampq.errors import ConfigError
from lampq.graph.attention import explicit
from lampq.graph.families import TIMM, RolePattern
from lampq.graph.rotate import rotate_attention_
from lampq.limits import budget_of, check_room, check_widths
from lampq.methods import METHODS, Method, SiteWidths
from lampq.metrics import METRICS, Metric
from lampq.models import ModelSource, check_finite
from lampq.reconstruct import FINISHERS, Finisher
from lampq.task import Task
from lampq.tasks import task_of
from lampq.types import MAX_BITS, BitPlan, LayerBits, ModelGraph

# fields of plug-ins that the configuration calls by the paper's letter or by stage
OPTION_OF_FIELD = {
    "penalty": "gamma",
    "probe_bits": "beta",
    "probe_blocks": "mu",
    "images": "metric_images",
}
T = TypeVar("T")


def options_of(factory: Callable[..., Any], config: RunConfig) -> dict[str, Any]:
    """The options of the configuration that a plug-in has a field or an argument for."""
    taken = {}
    for name in inspect.signature(factory).parameters:
        key = OPTION_OF_FIELD.get(name, name)
        if hasattr(config, key):
            taken[name] = getattr(config, key)
    return taken


def build(factory: Callable[..., T], config: RunConfig) -> T:
    """A method or metric with its options of the configuration."""
    return factory(**options_of(factory, config))


def check_known(config: RunConfig) -> None:
    """Raise if the method has no form of what is wanted of the inputs."""
    known = inspect.signature(METHODS.get(config.method)).parameters
    if config.prefix_bits != "target" and "prefix_bits" not in known:
        raise ConfigError(
            f"method {config.method!r} has one width for all tokens: set prefix_bits to target, "
            f"got {config.prefix_bits}"
        )
    if config.input_ranges != "static" and "input_ranges" not in known:
        raise ConfigError(
            f"method {config.method!r} has static ranges only: set input_ranges to static, got "
            f"{config.input_ranges!r}"
        )


def site_widths(config: RunConfig) -> SiteWidths:
    """Widths of the sites that are not searched."""
    target = config.target
    edge, matmul, heads = config.edge_bits, config.matmul_bits, config.head_bits
    return SiteWidths(
        edge=target if edge == "target" else LayerBits(edge, edge),
        matmul=None if matmul == "follow" else target.activation if matmul == "target" else matmul,
        rest=config.rest_bits,
        behind=LayerBits(heads, heads) if isinstance(heads, int) else target,
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked job: the model in explicit form, its source and graph, and the plug-ins."""

    model: nn.Module
    source: ModelSource
    graph: ModelGraph
    task: Task
    method: Method
    metric: Metric
    allocator: Allocator
    finisher: Finisher | None


def prepare(
    model: nn.Module,
    config: RunConfig,
    patterns: tuple[RolePattern, ...] = TIMM,
    plan: Mapping[str, LayerBits] | None = None,
) -> Prepared:
    """All checks that need no image: names, weights, graph, budget, plan."""
    check_known(config)
    method = build(METHODS.get(config.method), config)
    metric = build(METRICS.get(config.metric), config)
    function = ALLOCATORS.get(config.allocator)
    allocator = partial(function, **options_of(function, config))
    task = task_of(config)
    check_finite(model)
    source = task.source(model)
    opened = explicit(model)
    if config.rotation == "attention":
        rotate_attention_(opened, config.seed)
    graph = task.graph(opened, patterns)
    if config.profile == "speed":
        graph = replace(graph, matmuls=(), sums=())
    # what a file and its operations amount to is known later
    weights = MAX_BITS if config.target_size or config.target_bops else None
    check_feasible(graph.allocatable, config.widths, budget_of(config, weights))
    if config.target_size is not None:
        check_room(graph.allocatable, config.widths, config.target_size)
    if plan is not None:
        check_widths(given_plan(graph, plan), config)
    finisher = None
    if config.reconstruct is not None:
        finisher = build(FINISHERS.get(config.reconstruct), config)
    return Prepared(opened, source, graph, task, method, metric, allocator, finisher)


def given_plan(graph: ModelGraph, given: Mapping[str, LayerBits]) -> BitPlan:
    """The plan of these widths, which must name every searched layer and no other."""
    names = [layer.name for layer in graph.allocatable]
    for name in given:
        if name not in names:
            raise ConfigError(f"the plan names {name!r}, which is no searched layer of the model")
    for name in names:
        if name not in given:
            raise ConfigError(f"the plan has no width for {name!r}")
    return BitPlan(graph.allocatable, tuple(given[name] for name in names))

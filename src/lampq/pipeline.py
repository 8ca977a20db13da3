"""quantize(): the whole of LampQ."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lampq.allocate import ALLOCATORS, Allocator, check_feasible
from lampq.artifact.checkpoint import checkpoint_bytes, write_atomically
from lampq.calibrate import Stats, collect
from lampq.config import RunConfig, make_config
from lampq.data import AnySamples, Preprocessing, Samples
from lampq.errors import ConfigError
from lampq.finish import Reconstruction, reconstructed
from lampq.graph.attention import explicit
from lampq.graph.discover import missing_roles, verify_norms
from lampq.graph.families import TIMM, RolePattern
from lampq.graph.rotate import rotate_attention_
from lampq.limits import budget_of, check_room, check_widths, run_budget, widest_uniform
from lampq.methods import METHODS, FitCache, Method, SiteWidths
from lampq.methods.base import sums_of
from lampq.methods.sequential import collect_in_order
from lampq.metrics import METRICS, Evidence, Metric, Sensitivity
from lampq.models import ModelSource, check_finite
from lampq.reconstruct import FINISHERS, Finisher
from lampq.scoring import PlanScorer, Run, better_start, improved, not_worse_than_uniform
from lampq.task import Measured, Task
from lampq.tasks import gathered, task_of
from lampq.types import MAX_BITS, Allocation, BitPlan, Budget, LayerBits, ModelGraph, Step

# fields of plug-ins that the configuration calls by the paper's letter or by stage
OPTION_OF_FIELD = {
    "penalty": "gamma",
    "probe_bits": "beta",
    "probe_blocks": "mu",
    "images": "metric_images",
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """A quantized model, its plan, and how they came about.

    Attributes:
        model: The quantized model: called as the float one.
        plan: The widths of its searched layers.
        graph: What was found in the float model.
        config: The options in effect.
        budget: What the plan had to keep to.
        source: How the architecture is built again.
        fits: Every layer at every width that was looked at.
        uniform: The plan of one width that the result is compared with.
        sensitivity: The costs of all widths; None where the plan was given.
        allocation: The plan before the exchanges; None where the plan was given.
        steps: The exchanges that were tried, in order.
        calibration: Qualities on calibration images of ``fp32``, ``uniform`` and ``mixed``.
        notices: What the user should know, in sentences.
        reconstruction: What training after the plan brought; None where there was none.
        start: The plan that the exchanges started from; None where none was tried.
    """

    model: nn.Module
    plan: BitPlan
    graph: ModelGraph
    config: RunConfig
    budget: Budget
    source: ModelSource
    fits: FitCache
    uniform: BitPlan
    sensitivity: Sensitivity | None
    allocation: Allocation | None
    steps: tuple[Step, ...]
    calibration: Mapping[str, Measured]
    notices: tuple[str, ...]
    reconstruction: Reconstruction | None = None
    start: BitPlan | None = None

    def save(self, path: str | Path) -> None:
        """Write the packed checkpoint, atomically."""
        write_atomically(Path(path), packed(self.model, self.source, self.plan, self.config))

    def uniform_model(self) -> nn.Module:
        """The model at the uniform width of the same budget."""
        return self.of_plan(self.uniform)

    def of_plan(self, plan: BitPlan) -> nn.Module:
        """The model at the widths of another plan, from the same fits."""
        return self.fits.assembled(plan)


def packed(
    model: nn.Module,
    source: ModelSource,
    plan: BitPlan,
    config: RunConfig,
    preprocessing: Preprocessing | None = None,
) -> bytes:
    """The checkpoint of an assembled model; it remembers how its pictures are prepared."""
    notes: dict[str, Any] = {
        "plan": {name: [width.weight, width.activation] for name, width in plan.items()},
        "config": config.to_json(),
        "preprocessing": None if preprocessing is None else asdict(preprocessing),
    }
    return checkpoint_bytes(model, source, notes)


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


def quantize(
    model: nn.Module,
    samples: AnySamples | Iterable[object],
    *,
    config: RunConfig | None = None,
    patterns: tuple[RolePattern, ...] = TIMM,
    plan: Mapping[str, LayerBits] | None = None,
    run: Run | None = None,
    **options: Any,
) -> Result:
    """Find a bit plan within the budget and quantize the model by it; the model stays as it is.

    Args:
        model: The float model: a classifier, or a detector of ``lampq.detection``.
        samples: Calibration images: ``Samples``, or an iterable of batches, with labels or without;
            ``DetectionSamples`` for a detector.
        config: All options, from ``make_config``; instead of single ones.
        patterns: Which layer plays which role, for models that timm does not have.
        plan: Widths by layer name, to use instead of a search.
        run: Progress, journal and stores of a run that can be resumed.
        **options: Fields of ``RunConfig``, such as ``bits=3, preset="paper", seed=1``.

    Raises:
        LampqError: Where something is wrong, before long work; its message is one sentence.
    """
    if config is not None and options:
        raise ConfigError("give either config or single options, not both")
    taken = gathered(samples)
    found = "classification" if isinstance(taken, Samples) else "detection"
    config = config or make_config({"task": found, **options})
    if config.task != found:
        raise ConfigError(f"the task is {config.task}, and the samples are those of {found}")
    run = run or Run()
    notices: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = _quantize(model, taken, config, patterns, plan, run, notices)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=2)
        if issubclass(warning.category, UserWarning):
            notices.append(str(warning.message))
    return Result(
        **{
            **{f: getattr(result, f) for f in Result.__slots__},
            "notices": tuple(dict.fromkeys(notices)),
        }
    )


def _quantize(
    model: nn.Module,
    samples: AnySamples,
    config: RunConfig,
    patterns: tuple[RolePattern, ...],
    given: Mapping[str, LayerBits] | None,
    run: Run,
    notices: list[str],
) -> Result:
    job = prepare(model, config, patterns, given)
    source, task = job.source, job.task
    _warn_of_gaps(job.graph, config)
    samples = samples.subset(config.images, config.seed)
    fits = run.fits(lambda: _fits(job, samples, config, run)).at(site_widths(config), run.progress)
    opened, graph = fits.model, fits.graph

    def write(plan: BitPlan) -> bytes:
        return packed(fits.assembled(plan), source, plan, config)

    budget = run_budget(
        config, fits, write, samples, None if given is None else given_plan(graph, given)
    )
    uniform = widest_uniform(graph, config, budget)
    scored = samples.subset(config.score_images, config.seed + 1)
    with run.progress.stage("refine"):
        scorer = PlanScorer(fits, scored, task.predict(opened, scored), run, task)
    sensitivity: Sensitivity | None = None
    allocation: Allocation | None = None
    steps: tuple[Step, ...] = ()
    start: BitPlan | None = None
    if given is not None:
        plan = given_plan(graph, given)
        notices += [f"the given plan {complaint}" for complaint in budget.complaints(plan)]
    else:
        with run.progress.stage("metric"):
            evidence = Evidence(
                opened, graph, fits, samples, config.seed, run.progress, run.journal, task
            )
            sensitivity = job.metric(evidence, config.widths)
        with run.progress.stage("allocate"):
            allocation = job.allocator(sensitivity.table, budget)
        start = better_start(allocation.plan, uniform, scorer, config)
        plan, steps = improved(start, budget, sensitivity, scorer, samples, config, run)
        plan = not_worse_than_uniform(plan, uniform, scorer, config)
    with run.progress.stage("refine"):
        calibration = {
            "fp32": task.quality(scorer.reference, scorer.reference, scored),
            "uniform": scorer.quality(uniform),
            "mixed": scorer.quality(plan),
        }
        if start is not None and steps:
            calibration["start"] = scorer.quality(start)
    final = fits.assembled(plan)
    run.on_plan(plan, final)
    reconstruction = None
    if job.finisher is not None:
        assert isinstance(samples, Samples), "checked by the configuration"
        with run.progress.stage("reconstruct"):
            trained, reconstruction = reconstructed(
                job.finisher, final, fits, plan, samples, config, run
            )
        if reconstruction.kept:
            final = trained
            run.on_plan(plan, final)
    return Result(
        final,
        plan,
        graph,
        config,
        budget,
        source,
        fits,
        uniform,
        sensitivity,
        allocation,
        steps,
        calibration,
        (),
        reconstruction,
        start if steps else None,
    )


def _fits(job: Prepared, samples: AnySamples, config: RunConfig, run: Run) -> FitCache:
    """A cache of fits, empty yet, on what every site sees."""
    with run.progress.stage("collect"):
        few = samples.inputs(slice(0, 2))
        graph = verify_norms(job.model, job.graph, few, job.task.outputs)
        stats = _statistics(job, graph, samples.subset(config.fit_images, config.seed), config, run)
    return FitCache(
        job.model,
        graph,
        job.method,
        stats,
        site_widths(config),
        store=run.store,
        progress=run.progress,
    )


def behind_quantized(method: object, config: RunConfig) -> bool:
    """Whether fits see inputs behind sites at the target width; a method or its class."""
    if config.fit_inputs == "published":
        return bool(getattr(method, "sequential", False))
    return config.fit_inputs == "quantized"


def _statistics(
    job: Prepared, graph: ModelGraph, samples: AnySamples, config: RunConfig, run: Run
) -> Mapping[str, Stats]:
    """What every site sees: in the float model, or behind sites at the target width."""
    if not behind_quantized(job.method, config):
        return collect(
            job.model,
            graph,
            samples,
            tokens=config.fit_tokens,
            gradients=getattr(job.method, "wants_gradients", False),
            block_images=getattr(job.method, "block_images", 0),
            sums=sums_of(graph, job.method),
            max_tokens=job.task.max_tokens,
            seed=config.seed,
            passes=job.task,
        )
    plan = BitPlan.uniform(graph.allocatable, config.target)
    return collect_in_order(
        job.model,
        graph,
        samples,
        job.method,
        plan,
        site_widths(config),
        max_tokens=job.task.max_tokens,
        seed=config.seed,
        progress=run.progress,
        passes=job.task,
    )


def _warn_of_gaps(graph: ModelGraph, config: RunConfig) -> None:
    if not graph.matmuls and config.profile == "accuracy":
        warnings.warn(
            "the attention of this model is unknown to lampq: its matmuls stay in float",
            stacklevel=2,
        )
    missing = missing_roles(graph)
    if missing:
        names = ", ".join(role.value for role in missing)
        warnings.warn(f"no layer plays the role {names}", stacklevel=2)


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

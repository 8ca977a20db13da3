"""quantize(): the whole of LampQ."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lampq.artifact.checkpoint import checkpoint_bytes, write_atomically
from lampq.calibrate import Stats, collect
from lampq.config import RunConfig, make_config
from lampq.data import AnySamples, Preprocessing, Samples
from lampq.errors import ConfigError
from lampq.finish import Reconstruction, reconstructed
from lampq.graph.discover import missing_roles, verify_norms, verify_prefix
from lampq.graph.families import TIMM, RolePattern
from lampq.limits import run_budget, widest_uniform
from lampq.methods import FitCache
from lampq.methods.base import sums_of
from lampq.methods.sequential import collect_in_order
from lampq.metrics import Evidence, Sensitivity
from lampq.metrics.contrast import with_contrast
from lampq.models import ModelSource
from lampq.prepare import Prepared, given_plan, prepare, site_widths
from lampq.scoring import PlanScorer, Run, better_start, improved, not_worse_than_uniform
from lampq.statistics import Deferred, through
from lampq.task import Measured
from lampq.tasks import gathered
from lampq.types import Allocation, BitPlan, Budget, LayerBits, ModelGraph, Step
from lampq.views import with_views

# with so many images fits need no other views of them
ENOUGH_IMAGES = 256


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
        calibration: Qualities on calibration images of ``fp32``, ``uniform`` and ``mixed``, and
            of the model after training where that was kept, ``reconstructed``.
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
        reference = task.predict(opened, scored, run.progress)
        scorer = PlanScorer(fits, scored, reference, run, task)
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
            found = job.metric(evidence, config.widths)
            table = with_contrast(found.table, config.block_contrast)
            sensitivity = replace(found, table=table)
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
            final, reconstruction = reconstructed(
                job.finisher, final, fits, plan, samples, config, run
            )
            if reconstruction.kept:
                answers = job.task.predict(final, scored)
                quality = job.task.quality(answers, scorer.reference, scored)
                calibration["reconstructed"] = quality
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


def fit_cache(model: nn.Module, samples: Samples, config: RunConfig, run: Run) -> FitCache:
    """The fits that a run with these options has, each computed when it is asked for."""
    job = prepare(model, config)
    samples = samples.subset(config.images, config.seed)
    return run.fits(lambda: _fits(job, samples, config, run)).at(site_widths(config), run.progress)


def _fits(job: Prepared, samples: AnySamples, config: RunConfig, run: Run) -> FitCache:
    """A cache of fits, empty yet, on what every site sees."""
    with run.progress.stage("collect"):
        few = samples.inputs(slice(0, 2))
        graph = verify_norms(job.model, job.graph, few, job.task.outputs)
        graph = verify_prefix(job.model, graph, few, job.task.outputs)

    def made() -> Mapping[str, Stats]:
        few = seen_by_fits(samples, config)
        sums = sums_of(graph, job.method)
        with run.progress.stage("collect"):
            collect_all = partial(_statistics, job, graph, few, config, run)
            return through(run.statistics, graph, sums, collect_all)

    return FitCache(
        job.model,
        graph,
        job.method,
        Deferred(made),
        site_widths(config),
        store=run.store,
        progress=run.progress,
    )


def seen_by_fits(samples: AnySamples, config: RunConfig) -> AnySamples:
    """The images that fits look at; where there are few, with other views of them."""
    few = samples.subset(config.fit_images, config.seed)
    if not isinstance(few, Samples):
        return few
    return with_views(few, min(config.fit_views, ENOUGH_IMAGES // len(few)), config.seed)


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
            progress=run.progress,
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

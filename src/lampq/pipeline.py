"""quantize(): the whole of LampQ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lampq.allocate import ALLOCATORS, check_feasible
from lampq.artifact.checkpoint import checkpoint_bytes, write_atomically
from lampq.artifact.pack import packed_size
from lampq.calibrate import collect
from lampq.config import RunConfig, make_config
from lampq.data import Preprocessing, Samples, gather
from lampq.errors import BudgetError, ConfigError
from lampq.evaluate import PrefixCache, Quality, predict
from lampq.graph.attention import explicit
from lampq.graph.discover import discover, missing_roles, verify_norms
from lampq.graph.families import TIMM, RolePattern
from lampq.methods import METHODS, FitCache, FitStore, Method, SiteWidths
from lampq.methods.base import LinearView
from lampq.methods.search import EXHAUSTIVE, SearchDepth
from lampq.metrics import METRICS, Evidence, Metric, Sensitivity
from lampq.metrics.context import Changes, context_changes
from lampq.models import ModelSource, check_finite, source_of
from lampq.progress import Journal, Progress
from lampq.quant.modules import assemble
from lampq.refine import RefineOptions, neighbours, refine, refine_in_context
from lampq.types import Allocation, BitPlan, Budget, LayerBits, ModelGraph, Step

# the preprocessing that a checkpoint may carry, as JSON
HEADER_ROOM = 160


@dataclass(frozen=True, slots=True)
class Run:
    """What goes on beside the computation: progress, journal, stored fits, best plan so far."""

    progress: Progress = field(default_factory=Progress)
    journal: Journal = field(default_factory=Journal)
    store: FitStore | None = None
    on_plan: Callable[[BitPlan, nn.Module], None] = lambda plan, model: None


@dataclass(frozen=True, slots=True)
class Result:
    """A quantized model, its plan, and how they came about."""

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
    calibration: Mapping[str, Quality]
    notices: tuple[str, ...]

    def save(self, path: str | Path) -> None:
        """Write the packed checkpoint, atomically."""
        write_atomically(Path(path), packed(self.model, self.source, self.plan, self.config))

    def uniform_model(self) -> nn.Module:
        """The model at the uniform width of the same budget."""
        return self.of_plan(self.uniform)

    def of_plan(self, plan: BitPlan) -> nn.Module:
        """The model at the widths of another plan, from the same fits."""
        return assemble(self.fits.model, *self.fits.of_plan(plan))


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


def build_method(config: RunConfig) -> Method:
    """The configured base method."""
    factory = METHODS.get(config.method)
    options: dict[str, dict[str, Any]] = {
        "adalog": {
            "depth": EXHAUSTIVE if config.search == "exhaustive" else SearchDepth(),
            "rounds": 3 if config.search == "exhaustive" else 1,
            "zero_code": config.zero_code,
            "onebit": config.onebit,
            "compensation": config.compensation,
        },
        "repq": {"zero_code": config.zero_code},
    }
    return factory(**options.get(config.method, {}))


def build_metric(config: RunConfig) -> Metric:
    """The configured metric."""
    factory = METRICS.get(config.metric)
    options: dict[str, dict[str, Any]] = {
        "fisher": {
            "penalty": config.gamma,
            "probe_bits": config.beta,
            "probe_blocks": config.mu,
            "labels": config.labels,
            "alpha_signal": config.alpha_signal,
            "alpha_trace": config.alpha_trace,
            "images": config.metric_images,
            "probe_images": config.probe_images,
            "trace_images": config.trace_images,
        },
        "output": {"images": config.metric_images, "labels": config.labels},
        "kl": {"images": config.metric_images},
    }
    return factory(**options.get(config.metric, {}))


def site_widths(config: RunConfig) -> SiteWidths:
    """Widths of the sites that are not searched."""
    target = config.target
    edge = config.edge_bits
    matmul = config.matmul_bits
    return SiteWidths(
        edge=target if edge == "target" else LayerBits(edge, edge),
        matmul=None if matmul == "follow" else target.activation if matmul == "target" else matmul,
    )


class PlanScorer:
    """Scores plans on some samples, running only the blocks that differ from the last base."""

    def __init__(self, fits: FitCache, samples: Samples, reference: Tensor, run: Run) -> None:
        self.fits, self.samples, self.reference, self.run = fits, samples, reference, run
        self._base: tuple[BitPlan, PrefixCache] | None = None

    def rebase(self, plan: BitPlan) -> None:
        """Score later plans as changes of this one."""
        self._base = None
        if self.fits.graph.blocks and all(layer.block >= 0 for layer in plan.layers):
            model = assemble(self.fits.model, *self.fits.of_plan(plan))
            self._base = (plan, PrefixCache(model, self.fits.graph.blocks, self.samples))

    def quality(self, plan: BitPlan) -> Quality:
        """How good the plan is on the samples."""
        key = " ".join(map(str, plan.widths))
        values = self.run.journal.once(
            f"score {len(self.samples)} {key}", lambda: self._measure(plan)
        )
        return Quality(*values)

    def _measure(self, plan: BitPlan) -> list[float]:
        model = assemble(self.fits.model, *self.fits.of_plan(plan))
        if self._base is None:
            logits = predict(model, self.samples)
        else:
            base, cache = self._base
            changed = [layer.block for layer in plan.layers if base[layer.name] != plan[layer.name]]
            logits = cache.predict(model, min(changed)) if changed else cache.logits
        quality = Quality.of(logits, self.reference, self.samples.labels)
        return [quality.accuracy, quality.likelihood, quality.agreement]


@torch.no_grad()
def cumulative_errors(fits: FitCache, plan: BitPlan, samples: Samples) -> dict[str, float]:
    """Relative squared error of each layer's output in the quantized model against the float one.

    Both models run in lock-step, batch by batch; no activation outlives its batch.
    """
    quantized = assemble(fits.model, *fits.of_plan(plan))
    names = list(plan)
    biases = {name: LinearView.of(fits.model, fits.graph.layer(name)).bias for name in names}
    sums = {name: [0.0, 0.0] for name in names}
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _arguments, output: outputs.__setitem__(name, output)

    def compare(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def add(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
            exact = outputs.pop(name)
            sums[name][0] += float((output - exact).square().sum())
            sums[name][1] += float((exact - biases[name]).square().sum())

        return add

    handles = [fits.model.get_submodule(n).register_forward_hook(keep(n)) for n in names]
    handles += [quantized.get_submodule(n).register_forward_hook(compare(n)) for n in names]
    try:
        for images, _ in samples.batches(16):
            fits.model(images)
            quantized(images)
    finally:
        for handle in handles:
            handle.remove()
    return {name: error / max(power, 1e-30) for name, (error, power) in sums.items()}


def quantize(
    model: nn.Module,
    samples: Samples | Iterable[object],
    *,
    config: RunConfig | None = None,
    patterns: tuple[RolePattern, ...] = TIMM,
    plan: Mapping[str, LayerBits] | None = None,
    run: Run | None = None,
    **options: Any,
) -> Result:
    """Find a bit plan within the budget and quantize the model by it; the model stays as it is.

    ``options`` are fields of RunConfig (``bits=3, preset="paper", seed=1``); ``plan`` skips the
    search and takes these widths.
    """
    if config is not None and options:
        raise ConfigError("give either config or single options, not both")
    config = config or make_config(options)
    run = run or Run()
    notices: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = _quantize(model, gather(samples), config, patterns, plan, run, notices)
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
    samples: Samples,
    config: RunConfig,
    patterns: tuple[RolePattern, ...],
    given: Mapping[str, LayerBits] | None,
    run: Run,
    notices: list[str],
) -> Result:
    check_finite(model)
    method, metric = build_method(config), build_metric(config)
    allocator = ALLOCATORS.get(config.allocator)
    source = source_of(model)
    opened = explicit(model)
    graph = discover(opened, patterns)
    if config.target_size is None:
        check_feasible(graph.allocatable, config.widths, Budget(config.bits))
    _warn_of_gaps(graph)
    samples = samples.subset(config.images, config.seed)
    with run.progress.stage("collect"):
        graph = verify_norms(opened, graph, samples.inputs(slice(0, 2)))
        stats = collect(
            opened, graph, samples.subset(config.fit_images, config.seed), seed=config.seed
        )
    fits = FitCache(
        opened,
        graph,
        method,
        stats,
        site_widths(config),
        store=run.store,
        progress=run.progress,
    )
    uniform = BitPlan.uniform(graph.allocatable, config.target)
    budget = Budget(config.bits)
    if config.target_size is not None:
        budget = _size_budget(config, fits, uniform, source)
        narrow = max((w for w in config.widths if budget.mean_bits >= w.weight), default=None)
        check_feasible(graph.allocatable, config.widths, budget)
        uniform = BitPlan.uniform(graph.allocatable, narrow or config.widths[0])
    scored = samples.subset(config.score_images, config.seed + 1)
    with run.progress.stage("refine"):
        scorer = PlanScorer(fits, scored, predict(opened, scored), run)
    sensitivity: Sensitivity | None = None
    allocation: Allocation | None = None
    steps: tuple[Step, ...] = ()
    if given is not None:
        plan = _given_plan(graph, given)
        if not budget.allows(plan):
            notices.append(
                f"the given plan averages {plan.mean_weight_bits:.3f} bits, "
                f"above the target of {budget.mean_bits:.3f}"
            )
    else:
        with run.progress.stage("metric"):
            evidence = Evidence(
                opened, graph, fits, samples, config.seed, run.progress, run.journal
            )
            sensitivity = metric(evidence, config.widths)
        with run.progress.stage("allocate"):
            allocation = allocator(sensitivity.table, budget)
        plan, steps = _refined(allocation.plan, budget, sensitivity, scorer, samples, config, run)
        plan = _not_worse_than_uniform(plan, uniform, scorer, config)
    with run.progress.stage("refine"):
        calibration = {
            "fp32": Quality.of(scorer.reference, scorer.reference, scored.labels),
            "uniform": scorer.quality(uniform),
            "mixed": scorer.quality(plan),
        }
    final = assemble(opened, *fits.of_plan(plan))
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
    )


def _warn_of_gaps(graph: ModelGraph) -> None:
    if not graph.matmuls:
        warnings.warn(
            "the attention of this model is unknown to lampq: its matmuls stay in float",
            stacklevel=4,
        )
    missing = missing_roles(graph)
    if missing:
        names = ", ".join(role.value for role in missing)
        warnings.warn(f"no layer plays the role {names}", stacklevel=4)


def _score_of(quality: Quality, accept: str) -> float:
    return {"accuracy": quality.accuracy, "loss": quality.likelihood, "kl": quality.agreement}[
        accept
    ]


def _size_budget(
    config: RunConfig, fits: FitCache, uniform: BitPlan, source: ModelSource
) -> Budget:
    """The mean width that fills a file of the wanted size, everything in the file counted."""
    assert config.target_size is not None, "only called with a size"
    overheads = []
    for bits in config.widths:
        plan = BitPlan.uniform(uniform.layers, bits)
        whole = packed(assemble(fits.model, *fits.of_plan(plan)), source, plan, config)
        codes = sum(packed_size(layer.n_params, bits.weight) for layer in plan.layers)
        overheads.append(len(whole) - codes)
    # offsets in the header may take a digit more, and every layer up to a byte of padding
    fixed = max(overheads) + HEADER_ROOM + 4 * len(fits.model.state_dict()) + len(uniform.layers)
    room = 8 * (config.target_size - fixed)
    weights = sum(layer.n_params for layer in uniform.layers)
    if room < config.widths[0].weight * weights:
        least = fixed + config.widths[0].weight * weights // 8 + 1
        raise BudgetError(
            f"a file of {config.target_size} bytes is too small: with every layer at "
            f"{config.widths[0].weight} bits it takes {least} bytes"
        )
    return Budget(room / weights)


def _given_plan(graph: ModelGraph, given: Mapping[str, LayerBits]) -> BitPlan:
    names = [layer.name for layer in graph.allocatable]
    for name in given:
        if name not in names:
            raise ConfigError(f"the plan names {name!r}, which is no searched layer of the model")
    for name in names:
        if name not in given:
            raise ConfigError(f"the plan has no width for {name!r}")
    return BitPlan(graph.allocatable, tuple(given[name] for name in names))


def _refined(
    plan: BitPlan,
    budget: Budget,
    sensitivity: Sensitivity,
    scorer: PlanScorer,
    samples: Samples,
    config: RunConfig,
    run: Run,
) -> tuple[BitPlan, tuple[Step, ...]]:
    """The plan after all accepted exchanges, and every attempted one."""
    table = sensitivity.table
    rows = {layer.name: i for i, layer in enumerate(table.layers)}

    def error_at(name: str, bits: LayerBits) -> float:
        if config.exchange_error == "cost":
            return float(table.cost[rows[name], table.choices.index(bits)])
        return scorer.fits.error(name, bits)

    def errors(current: BitPlan) -> Mapping[str, float]:
        if config.exchange_error == "cumulative":
            few = samples.subset(config.fit_images, config.seed)
            key = " ".join(map(str, current.widths))
            return run.journal.once(
                f"cumulative {key}", lambda: cumulative_errors(scorer.fits, current, few)
            )
        return {name: error_at(name, bits) for name, bits in current.items()}

    options = RefineOptions(
        config.ratios, config.gain_formula, config.swap_budget, config.patience, config.exchanges
    )
    steps: list[Step] = []
    with run.progress.stage("refine"):
        run.on_plan(plan, assemble(scorer.fits.model, *scorer.fits.of_plan(plan)))
        if config.exchanges == 0:
            return plan, ()
        scorer.rebase(plan)
        if config.update == "context":
            attempts = refine_in_context(
                plan,
                budget,
                changes=lambda p: _changes(p, scorer.fits, samples, table.choices, config, run),
                score=lambda p: _score_of(scorer.quality(p), config.accept),
                max_updates=config.exchanges,
                patience=config.patience,
            )
        else:
            attempts = refine(
                plan,
                budget,
                choices=table.choices,
                errors=errors,
                error_at=error_at,
                score=lambda p: _score_of(scorer.quality(p), config.accept),
                options=options,
            )
        for step in run.progress.track(attempts, "exchanges", None):
            steps.append(step)
            if step.accepted:
                plan = step.plan
                scorer.rebase(plan)
                run.on_plan(plan, assemble(scorer.fits.model, *scorer.fits.of_plan(plan)))
    return plan, tuple(steps)


def _changes(
    plan: BitPlan,
    fits: FitCache,
    samples: Samples,
    choices: tuple[LayerBits, ...],
    config: RunConfig,
    run: Run,
) -> Changes:
    """Predicted effect of moving each layer one choice down or up."""
    moves = {
        name: tuple(other for other in neighbours(bits, choices) if other is not None)
        for name, bits in plan.items()
    }
    some = samples.subset(config.metric_images, config.seed)

    def measure() -> dict[str, list[float]]:
        reference = predict(fits.model, some)
        found = context_changes(fits, plan, some, reference, moves, run.progress)
        return {name: [found[name][bits] for bits in widths] for name, widths in moves.items()}

    key = " ".join(map(str, plan.widths))
    values = run.journal.once(f"context {len(some)} {key}", measure)
    return {name: dict(zip(widths, values[name], strict=True)) for name, widths in moves.items()}


def _not_worse_than_uniform(
    plan: BitPlan, uniform: BitPlan, scorer: PlanScorer, config: RunConfig
) -> BitPlan:
    mixed = _score_of(scorer.quality(plan), config.accept)
    plain = _score_of(scorer.quality(uniform), config.accept)
    if mixed >= plain:
        return plan
    warnings.warn(
        f"the mixed plan scores {mixed:.4g} and the uniform one {plain:.4g} on the calibration "
        f"images ({config.accept}): the uniform plan is returned",
        stacklevel=4,
    )
    return uniform

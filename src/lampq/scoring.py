"""Plans scored on calibration images, and improved as long as the score rises."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lampq.config import RunConfig
from lampq.data import AnySamples
from lampq.methods import FitCache, FitStore
from lampq.methods.base import LinearView
from lampq.metrics import Sensitivity
from lampq.passes import Passes
from lampq.progress import Journal, Progress
from lampq.reconstruct import NoStore, StateStore
from lampq.refine import RefineOptions, refine
from lampq.task import CLASSIFICATION, Measured, Prefix, Task
from lampq.types import BitPlan, Budget, LayerBits, Step


@dataclass(frozen=True, slots=True)
class Run:
    """What goes on beside the computation: progress, journal, stored fits, best plan so far.

    ``fits`` is given how to make the cache of fits, and may give back that of an earlier run.
    ``states`` keeps the tensors of an unfinished reconstruction, ``statistics`` what sites see.
    """

    progress: Progress = field(default_factory=Progress)
    journal: Journal = field(default_factory=Journal)
    store: FitStore | None = None
    on_plan: Callable[[BitPlan, nn.Module], None] = lambda plan, model: None
    states: StateStore = field(default_factory=NoStore)
    fits: Callable[[Callable[[], FitCache]], FitCache] = lambda make: make()
    statistics: StateStore = field(default_factory=NoStore)


class PlanScorer:
    """Scores plans on some samples, running only the blocks that differ from the last base."""

    def __init__(
        self,
        fits: FitCache,
        samples: AnySamples,
        reference: Any,
        run: Run,
        task: Task = CLASSIFICATION,
    ) -> None:
        self.fits, self.samples, self.reference, self.run = fits, samples, reference, run
        self.task = task
        self._base: tuple[BitPlan, Prefix] | None = None

    def rebase(self, plan: BitPlan) -> None:
        """Score later plans as changes of this one."""
        self._base = None
        if self.fits.graph.blocks and all(layer.block >= 0 for layer in plan.layers):
            model = self.fits.assembled(plan)
            prefix = self.task.prefix(model, self.fits.graph.blocks, self.samples)
            self._base = (plan, prefix)

    def quality(self, plan: BitPlan) -> Measured:
        """How good the plan is on the samples."""
        key = f"score {len(self.samples)} {widths_of(self.fits, plan)}"
        values = self.run.journal.once(key, lambda: self._measure(plan))
        return self.task.measured(values)

    def _measure(self, plan: BitPlan) -> list[Any]:
        model = self.fits.assembled(plan)
        if self._base is None:
            answers = self.task.predict(model, self.samples)
        else:
            base, cache = self._base
            changed = [layer.block for layer in plan.layers if base[layer.name] != plan[layer.name]]
            answers = cache.predict(model, min(changed)) if changed else cache.answers
        return self.task.quality(answers, self.reference, self.samples).values()


def widths_of(fits: FitCache, plan: BitPlan) -> str:
    """The widths of all sites, those outside the plan too."""
    sites = fits.sites
    behind = "" if sites.behind is None else f"{sites.behind} "
    return f"{sites.edge} {sites.matmul} {sites.rest} {behind}{' '.join(map(str, plan.widths))}"


@torch.no_grad()
def cumulative_errors(
    fits: FitCache, plan: BitPlan, samples: AnySamples, passes: Passes = CLASSIFICATION
) -> dict[str, float]:
    """Relative squared error of each layer's output in the quantized model against the float one.

    Both models run in lock-step, batch by batch; no activation outlives its batch.
    """
    quantized = fits.assembled(plan)
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
        for images, known in samples.batches(passes.at_once(16)):
            passes.forward(fits.model, images, known)
            passes.forward(quantized, images, known)
    finally:
        for handle in handles:
            handle.remove()
    return {name: error / max(power, 1e-30) for name, (error, power) in sums.items()}


def improved(
    plan: BitPlan,
    budget: Budget,
    sensitivity: Sensitivity,
    scorer: PlanScorer,
    samples: AnySamples,
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
            key = f"cumulative {len(few)} {widths_of(scorer.fits, current)}"
            return run.journal.once(
                key, lambda: cumulative_errors(scorer.fits, current, few, scorer.task)
            )
        return {name: error_at(name, bits) for name, bits in current.items()}

    options = RefineOptions(
        config.ratios, config.gain_formula, config.swap_budget, config.patience, config.exchanges
    )
    steps: list[Step] = []
    with run.progress.stage("refine"):
        run.on_plan(plan, scorer.fits.assembled(plan))
        if config.exchanges == 0:
            return plan, ()
        scorer.rebase(plan)
        attempts = refine(
            plan,
            budget,
            choices=table.choices,
            errors=errors,
            error_at=error_at,
            score=lambda p: scorer.quality(p).signal(config.accept),
            options=options,
            units=table.units,
        )
        for step in run.progress.track(attempts, "exchanges", None):
            steps.append(step)
            if step.accepted:
                plan = step.plan
                scorer.rebase(plan)
                run.on_plan(plan, scorer.fits.assembled(plan))
    return plan, tuple(steps)


def better_start(plan: BitPlan, uniform: BitPlan, scorer: PlanScorer, config: RunConfig) -> BitPlan:
    """What exchanges start from: the allocated plan, or the uniform one if that scores better."""
    if config.start == "allocated" or config.exchanges == 0:
        return plan
    mixed, plain = (scorer.quality(p).signal(config.accept) for p in (plan, uniform))
    return plan if mixed >= plain else uniform


def not_worse_than_uniform(
    plan: BitPlan, uniform: BitPlan, scorer: PlanScorer, config: RunConfig
) -> BitPlan:
    """The plan, or with a warning the uniform one where that scores better (``fallback``)."""
    if config.fallback == "none":
        return plan
    mixed, plain = (scorer.quality(p).signal(config.accept) for p in (plan, uniform))
    if mixed >= plain:
        return plan
    warnings.warn(
        f"the mixed plan scores {mixed:.4g} and the uniform one {plain:.4g} on the calibration "
        f"images ({config.accept}): the uniform plan is returned",
        stacklevel=2,
    )
    return uniform

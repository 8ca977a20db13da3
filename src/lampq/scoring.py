"""Plans scored on calibration images, and improved as long as the score rises."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lampq.config import RunConfig
from lampq.data import Samples
from lampq.evaluate import PrefixCache, Quality, predict
from lampq.methods import FitCache, FitStore
from lampq.methods.base import LinearView
from lampq.metrics import Sensitivity
from lampq.progress import Journal, Progress
from lampq.reconstruct import NoStore, StateStore
from lampq.refine import RefineOptions, refine
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

    def __init__(self, fits: FitCache, samples: Samples, reference: Tensor, run: Run) -> None:
        self.fits, self.samples, self.reference, self.run = fits, samples, reference, run
        self._base: tuple[BitPlan, PrefixCache] | None = None

    def rebase(self, plan: BitPlan) -> None:
        """Score later plans as changes of this one."""
        self._base = None
        if self.fits.graph.blocks and all(layer.block >= 0 for layer in plan.layers):
            model = self.fits.assembled(plan)
            self._base = (plan, PrefixCache(model, self.fits.graph.blocks, self.samples))

    def quality(self, plan: BitPlan) -> Quality:
        """How good the plan is on the samples."""
        key = f"score {len(self.samples)} {widths_of(self.fits, plan)}"
        values = self.run.journal.once(key, lambda: self._measure(plan))
        return Quality(*values)

    def _measure(self, plan: BitPlan) -> list[float]:
        model = self.fits.assembled(plan)
        if self._base is None:
            logits = predict(model, self.samples)
        else:
            base, cache = self._base
            changed = [layer.block for layer in plan.layers if base[layer.name] != plan[layer.name]]
            logits = cache.predict(model, min(changed)) if changed else cache.logits
        quality = Quality.of(logits, self.reference, self.samples.labels)
        return [quality.accuracy, quality.likelihood, quality.agreement]


def widths_of(fits: FitCache, plan: BitPlan) -> str:
    """The widths of all sites, those outside the plan too."""
    sites = fits.sites
    return f"{sites.edge} {sites.matmul} {sites.rest} {' '.join(map(str, plan.widths))}"


@torch.no_grad()
def cumulative_errors(fits: FitCache, plan: BitPlan, samples: Samples) -> dict[str, float]:
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
        for images, _ in samples.batches(16):
            fits.model(images)
            quantized(images)
    finally:
        for handle in handles:
            handle.remove()
    return {name: error / max(power, 1e-30) for name, (error, power) in sums.items()}


def _score_of(quality: Quality, accept: str) -> float:
    return {"accuracy": quality.accuracy, "loss": quality.likelihood, "kl": quality.agreement}[
        accept
    ]


def improved(
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
            key = f"cumulative {len(few)} {widths_of(scorer.fits, current)}"
            return run.journal.once(key, lambda: cumulative_errors(scorer.fits, current, few))
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
            score=lambda p: _score_of(scorer.quality(p), config.accept),
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
    mixed, plain = (_score_of(scorer.quality(p), config.accept) for p in (plan, uniform))
    return plan if mixed >= plain else uniform


def not_worse_than_uniform(
    plan: BitPlan, uniform: BitPlan, scorer: PlanScorer, config: RunConfig
) -> BitPlan:
    """The plan, or with a warning the uniform one where that scores better (``fallback``)."""
    if config.fallback == "none":
        return plan
    mixed = _score_of(scorer.quality(plan), config.accept)
    plain = _score_of(scorer.quality(uniform), config.accept)
    if mixed >= plain:
        return plan
    warnings.warn(
        f"the mixed plan scores {mixed:.4g} and the uniform one {plain:.4g} on the calibration "
        f"images ({config.accept}): the uniform plan is returned",
        stacklevel=2,
    )
    return uniform

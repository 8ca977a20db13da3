"""Reconstruction of a finished plan, judged on images that it has not seen."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn

from lampq.config import RunConfig
from lampq.data import Samples
from lampq.errors import DataError
from lampq.evaluate import Quality, predict
from lampq.methods import FitCache
from lampq.reconstruct import Finish, Finisher
from lampq.scoring import Run
from lampq.types import BitPlan

# images that reconstruction is judged on
HELD_OUT = 64


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """What training after the plan brought, on images that it has not seen.

    Attributes:
        name: The finisher.
        images: How many images it worked on.
        held_out: How many it was judged on, as they are and mirrored.
        before: The model as it was.
        stages: The models that the finisher offered on its way, and the last one.
    """

    name: str
    images: int
    held_out: int
    before: Quality
    stages: tuple[Quality, ...]

    @property
    def after(self) -> Quality:
        """The best of the stages."""
        return max(self.stages, key=lambda quality: quality.agreement)

    @property
    def kept(self) -> bool:
        """Whether the divergence from the float model fell."""
        return self.after.agreement > self.before.agreement


class _Judge:
    """Compares models on held-out images and their mirror images, and keeps the best.

    A few dozen images alone do not tell models apart.
    """

    def __init__(self, model: nn.Module, fits: FitCache, held: Samples) -> None:
        self.best, self.fits, self.held = model, fits, _with_mirrored(held)
        self.reference = predict(fits.model, self.held)
        self.seen = [self._quality(model)]

    def _quality(self, model: nn.Module) -> Quality:
        return Quality.of(predict(model, self.held), self.reference, self.held.labels)

    def better(self, model: nn.Module) -> bool:
        """Whether the model, as it would be stored, is better than all before it."""
        stored = self.fits.stored(model)
        found = self._quality(stored)
        better = all(found.agreement > one.agreement for one in self.seen)
        self.seen.append(found)
        if better:
            self.best = stored
        return better


def _with_mirrored(samples: Samples) -> Samples:
    """The images, and each of them mirrored."""
    labels = samples.labels
    return replace(
        samples,
        images=torch.cat([samples.images, samples.images.flip(-1)]),
        labels=None if labels is None else torch.cat([labels, labels]),
    )


def reconstructed(
    finisher: Finisher,
    model: nn.Module,
    fits: FitCache,
    plan: BitPlan,
    samples: Samples,
    config: RunConfig,
    run: Run,
) -> tuple[nn.Module, Reconstruction]:
    """The best of the model as it is and those of the finisher, on images kept from its work."""
    assert config.reconstruct is not None, "only called with a finisher"
    if len(samples) < 2:
        raise DataError("reconstruction needs at least two calibration images, got one")
    training, held = samples.split(min(HELD_OUT, len(samples) // 4 or 1), config.seed)
    training = training.subset(config.reconstruct_images, config.seed)
    judge = _Judge(model, fits, held)

    def offer(found: nn.Module) -> None:
        if judge.better(found):
            run.on_plan(plan, judge.best)

    layers, sites = fits.of_plan(plan)
    job = Finish(
        fits.model,
        fits.graph,
        tuple(layers),
        tuple(sites),
        training,
        config.seed,
        run.progress,
        run.states,
        offer,
    )
    offer(finisher(job))
    before, *stages = judge.seen
    outcome = Reconstruction(config.reconstruct, len(training), len(held), before, tuple(stages))
    last = stages[-1].agreement
    if not outcome.kept:
        warnings.warn(
            f"after {config.reconstruct} the divergence from the float model is "
            f"{-last:.4g}, before it {-before.agreement:.4g}: the model is returned as it was",
            stacklevel=2,
        )
    elif last < outcome.after.agreement:
        warnings.warn(
            f"after {config.reconstruct} the divergence from the float model is {-last:.4g}, on "
            f"the way there it was {-outcome.after.agreement:.4g}: the model from there is "
            "returned",
            stacklevel=2,
        )
    return judge.best, outcome

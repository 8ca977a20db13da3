"""Reconstruction of a finished plan, judged on images that it has not seen."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

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

    ``kept`` is whether the trained model is the result.
    """

    name: str
    images: int
    held_out: int
    before: Quality
    after: Quality

    @property
    def kept(self) -> bool:
        """Whether the divergence from the float model fell."""
        return self.after.agreement > self.before.agreement


def reconstructed(
    finisher: Finisher,
    model: nn.Module,
    fits: FitCache,
    plan: BitPlan,
    samples: Samples,
    config: RunConfig,
    run: Run,
) -> tuple[nn.Module, Reconstruction]:
    """The trained model, compared with the untrained one on images kept from the training."""
    assert config.reconstruct is not None, "only called with a finisher"
    if len(samples) < 2:
        raise DataError("reconstruction needs at least two calibration images, got one")
    training, held = samples.split(min(HELD_OUT, len(samples) // 4 or 1), config.seed)
    training = training.subset(config.reconstruct_images, config.seed)
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
    )
    trained = fits.stored(finisher(job))
    reference = predict(fits.model, held)
    before, after = (
        Quality.of(predict(one, held), reference, held.labels) for one in (model, trained)
    )
    outcome = Reconstruction(config.reconstruct, len(training), len(held), before, after)
    if not outcome.kept:
        warnings.warn(
            f"after {config.reconstruct} the divergence from the float model is "
            f"{-after.agreement:.4g}, before it {-before.agreement:.4g}: the model is returned as "
            "it was",
            stacklevel=2,
        )
    return trained, outcome

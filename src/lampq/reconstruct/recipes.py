"""The finishers by name, each with its own numbers where none are given.

Published are 20,000 steps a block. A shorter run takes the published rates times the root of the
ratio, at most tenfold: with the rates as they are the codes would hardly leave their places.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lampq.reconstruct.align import Align
from lampq.reconstruct.base import Rates
from lampq.reconstruct.blocks import BlockRecipe
from lampq.reconstruct.distill import Distill
from lampq.reconstruct.precision import Precision

PUBLISHED_STEPS = 20_000
STEPS = 500


def _rates(
    published: Rates, steps: int, weights: float | None, scales: float | None, affine: float | None
) -> Rates:
    """The given rates, and for those that are not given the published ones, made up for steps."""
    factor = min(10.0, max(1.0, math.sqrt(PUBLISHED_STEPS / steps)))
    return Rates(
        weights=published.weights * factor if weights is None else weights,
        scales=published.scales * factor if scales is None else scales,
        affine=published.affine if affine is None else affine,
    )


def _published(rates: Rates, **traits: Any) -> Callable[..., BlockRecipe]:
    """The factory of a published recipe."""

    def recipe(
        iterations: int | None = None,
        lr_weights: float | None = None,
        lr_scales: float | None = None,
        lr_affine: float | None = None,
        train_precision: Precision = "auto",
    ) -> BlockRecipe:
        steps = iterations or STEPS
        own = _rates(rates, steps, lr_weights, lr_scales, lr_affine)
        return BlockRecipe(
            "nearest two", own, iterations=steps, precision=train_precision, **traits
        )

    return recipe


# QDrop: blocks behind quantized ones, half of all activations left in float
qdrop = _published(Rates(1e-3, 4e-5, 0.0))
# PD-Quant: QDrop, and the difference of the predictions. Its correction of activations towards the
# statistics of batch normalisation is left out: these models have none
pdquant = _published(Rates(3e-3, 4e-5, 0.0), prediction=10.0)
# the second stage of AdaLog: blocks on float inputs, nothing left out
adalog = _published(Rates(1e-3, 4e-5, 0.0), inputs="float", drop=0.0)


def align(ridge: float | None = None) -> Align:
    """Ours without training: layer after layer by least squares."""
    return Align() if ridge is None else Align(ridge)


def distill(
    iterations: int | None = None,
    lr_weights: float | None = None,
    lr_scales: float | None = None,
    lr_affine: float | None = None,
    ridge: float | None = None,
    train_precision: Precision = "auto",
) -> Distill:
    """Ours: alignment, then the whole model at once."""
    own = Distill()
    return Distill(
        start=align(ridge),
        rates=Rates(
            own.rates.weights if lr_weights is None else lr_weights,
            own.rates.scales if lr_scales is None else lr_scales,
            own.rates.affine if lr_affine is None else lr_affine,
        ),
        iterations=iterations or own.iterations,
        precision=train_precision,
    )

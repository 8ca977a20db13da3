"""Which task a run has, and the samples that go with it."""

from __future__ import annotations

from typing import Any, cast

from lampq.config import RunConfig
from lampq.data import AnySamples, Samples, gather
from lampq.task import CLASSIFICATION, Task


def task_of(config: RunConfig) -> Task:
    """What the model is for."""
    if config.task == "classification":
        return CLASSIFICATION
    # what it takes is not needed by classifiers
    from lampq.detection.task import DetectionTask

    probed = (config.alpha_signal,) if config.metric == "fisher" else ()
    measured = {config.accept, *probed, *(("loss",) if config.metric == "loss" else ())}
    return DetectionTask(tuple(sorted(measured)), heads=config.head_bits != "float")


def gathered(samples: Any) -> AnySamples:
    """Samples as they are, or those of any iterable of images."""
    if isinstance(samples, Samples) or not hasattr(samples, "category_ids"):
        return gather(samples)
    return cast(AnySamples, samples)

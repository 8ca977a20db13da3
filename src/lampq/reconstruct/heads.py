"""Heads solved for the answers of the float model, behind everything that is quantized.

The features that a quantized model has in the end are those of the float model and noise, more in
some directions than in others. Least squares lower the weight of these directions. That the head is
linear in its input makes it one small problem for all classes: what it does to one class follows
from what it does to the features, so that classes without a picture gain as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lampq.hooks import recording, recording_outputs
from lampq.quant.modules import LayerFit, quantized_layer, replace_module
from lampq.quant.uniform import UniformQuantizer
from lampq.reconstruct.base import Finish
from lampq.reconstruct.least_squares import Problem
from lampq.types import LayerRole
from lampq.views import shown


@dataclass(frozen=True, slots=True)
class Heads:
    """Least squares for every head, on views of the images: mirrored, and a crop of each.

    The images as they are have decided about the layers before: the model is better on them than
    on others, and its features have less noise.

    ``ridge``: how strongly a weight is held at its float value, in mean squares of its inputs.
    ``smallest``: the least share of a picture that its crop keeps.
    """

    ridge: float = 3.0
    smallest: float = 0.5
    batch: int = 16

    @torch.no_grad()
    def __call__(self, job: Finish, model: nn.Module) -> nn.Module:
        """The quantized model, its heads solved anew; it is changed in place."""
        layers = {x.spec.name: job.model.get_submodule(x.spec.name) for x in job.layers}
        problems = {
            fit.spec.name: Problem(fit, layers[fit.spec.name], torch.ones(1))
            for fit in job.layers
            if _solvable(fit, layers[fit.spec.name])
        }
        names = list(problems)
        generator = torch.Generator().manual_seed(job.seed)
        starts = range(0, len(job.samples), self.batch) if names else ()
        for start in job.progress.track(starts, "solving heads", len(starts)):
            images = job.samples.inputs(slice(start, start + self.batch))
            views = torch.cat(
                [images.flip(-1), shown(images, self.smallest, generator, mirror=True)]
            )
            with recording_outputs(job.model, names) as wanted, recording(model, names) as given:
                job.model(views)
                model(views)
            for name, problem in problems.items():
                problem.add(given[name][0], wanted[name], wanted[name])
        for name, problem in problems.items():
            if not problem.uneven:
                solved = quantized_layer(problem.solved(self.ridge), layers[name])
                replace_module(model, name, solved)
        return model


def _solvable(fit: LayerFit, layer: nn.Module) -> bool:
    """Whether it is a head of the kind that least squares are for; own models may have others."""
    linear = isinstance(layer, nn.Linear) and isinstance(fit.weight_quantizer, UniformQuantizer)
    return fit.spec.role is LayerRole.HEAD and linear

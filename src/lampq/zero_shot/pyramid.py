"""Our own recipe: from dead leaves to a class, at all resolutions at once.

It starts from pictures that have the statistics of photographs already, and changes them as little
as makes the model name their class. Beside PSAQ-ViT's entropies and cross entropy:

- The change is a sum of layers of half, a quarter, ... of the resolution, each with the same rate.
  Equal steps per octave keep the spectrum that photographs have; steps on pixels add fine noise.
- Changes of colour are smaller than those of brightness, as in photographs.
- Every picture is shown shifted, zoomed and mirrored in its own way.
- A picture that its class has been given with a drawn probability is left as it is, so that answers
  are as unequally sure as those to photographs.
- The total variation of a picture is held to that of its start.
- All classes are made equally often.
- Some pictures stay dead leaves: weights that are compensated for both kinds are better on
  photographs than those that have seen one kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lampq.zero_shot.base import NO_CLASS, Answer, Subject, seeded
from lampq.zero_shot.canvas import Canvas, variation_per_image
from lampq.zero_shot.leaves import dead_leaves
from lampq.zero_shot.psaq import warm_cosine

COARSEST = 7
# brightness, red against blue, green against both; the columns have length one
OPPONENTS = (
    (3**-0.5, 2**-0.5, -(6**-0.5)),
    (3**-0.5, 0.0, 2 * 6**-0.5),
    (3**-0.5, -(2**-0.5), -(6**-0.5)),
)
# pixels are kept this far from black and white, where a sigmoid is flat
EDGE = 0.02


@dataclass(frozen=True, slots=True)
class PyramidRecipe:
    """Pictures from dead leaves.

    ``sure``: the range from which the wanted probability of a picture's class is drawn.
    ``colour``: how large steps of colour are against those of brightness. ``shift`` and ``zoom``
    are shares of the edge. ``plain``: the share of pictures that stay as they start.
    """

    name: ClassVar[str] = "pyramid"
    betas: ClassVar[tuple[float, float]] = (0.9, 0.99)
    steps: int = 40
    rate: float = 0.15
    colour: float = 0.3
    class_weight: float = 1.0
    entropy_weight: float = 0.25
    variation_weight: float = 1.0
    sure: tuple[float, float] = (0.5, 0.99)
    shift: float = 0.08
    zoom: float = 0.1
    plain: float = 0.5

    def labels(self, numbers: range, classes: int, seed: int) -> Tensor:
        """All classes in a random order, again and again, with plain pictures between them."""
        order = cache(
            lambda number: torch.randperm(classes, generator=seeded(seed, "classes", number))
        )
        # of the pictures before each, and of all of them, so many have a class
        named = [math.ceil(number * (1 - self.plain)) for number in (*numbers, numbers.stop)]
        labels = [
            int(order(before // classes)[before % classes]) if after > before else NO_CLASS
            for before, after in pairwise(named)
        ]
        return torch.tensor(labels)

    def begin(
        self, subject: Subject, canvas: Canvas, labels: Tensor, generator: torch.Generator
    ) -> PyramidPainting:
        """Dead leaves, one picture for each label."""
        del subject
        return PyramidPainting(self, canvas, labels, generator)


class PyramidPainting:
    """A batch of pictures from dead leaves."""

    def __init__(
        self, recipe: PyramidRecipe, canvas: Canvas, labels: Tensor, generator: torch.Generator
    ) -> None:
        self.recipe, self.canvas = recipe, canvas
        self._generator = generator
        _, channels, size, _ = canvas.shape(1)
        leaves = [dead_leaves(channels, size, generator) for _ in labels]
        self._leaves = torch.stack(leaves).clamp(EDGE, 1 - EDGE)
        self._named = labels != NO_CLASS
        self.labels = labels[self._named]
        self.start = torch.logit(self._leaves[self._named])
        count = len(self.labels)
        # the finest octave stays that of the leaves: there, steps would only add noise
        sizes = [-(-size // 2)]
        while sizes[-1] > COARSEST:
            sizes.append(-(-sizes[-1] // 2))
        self.parameters = [
            torch.zeros(count, channels, edge, edge, requires_grad=True) for edge in sizes
        ]
        self._mixing = torch.eye(channels)
        if channels == 3:
            self._mixing = torch.tensor(OPPONENTS) * torch.tensor(
                [1.0, recipe.colour, recipe.colour]
            )
        low, high = recipe.sure
        wanted = low + (high - low) * torch.rand(count, generator=generator)
        self.enough = -wanted.log()
        with torch.no_grad():
            self.roughness = variation_per_image(self._pictures()).clamp_min(1e-6)

    def _pictures(self) -> Tensor:
        *finer, change = self.parameters
        for layer in reversed(finer):
            change = layer + _enlarged(change, layer.shape[-1])
        change = _enlarged(change, self.canvas.how.size)
        mixed = torch.einsum("rc,nchw->nrhw", self._mixing, change)
        return self.canvas.inputs((self.start + mixed).sigmoid())

    def rate(self, step: int) -> float:
        """Warm-up and half a cosine."""
        return self.recipe.rate * warm_cosine(step, self.recipe.steps)

    def shown(self, step: int) -> Tensor:
        """Every picture of a class shifted, zoomed and mirrored in its own way."""
        del step
        pictures = self._pictures()
        count = len(pictures)
        draws = 2 * torch.rand(count, 4, generator=self._generator) - 1
        zoom = 1 + self.recipe.zoom * draws[:, 0]
        side = torch.where(draws[:, 1] > 0, 1.0, -1.0)
        view = torch.zeros(count, 2, 3)
        view[:, 0, 0], view[:, 1, 1] = zoom * side, zoom
        view[:, :, 2] = 2 * self.recipe.shift * draws[:, 2:]
        grid = F.affine_grid(view, list(pictures.shape), align_corners=False)
        return F.grid_sample(pictures, grid, padding_mode="reflection", align_corners=False)

    def loss(self, shown: Tensor, answer: Answer) -> Tensor:
        """Missing certainty and change of variation, minus the mean of the entropies."""
        missing = F.cross_entropy(answer.logits, self.labels, reduction="none") - self.enough
        rough = variation_per_image(shown) / self.roughness
        return (
            self.recipe.class_weight * missing.relu().mean()
            + self.recipe.variation_weight * (rough - 1).abs().mean()
            - self.recipe.entropy_weight * torch.stack(list(answer.entropies)).sum()
        )

    def settle(self) -> None:
        """A sigmoid keeps every pixel in range."""

    def finished(self) -> Tensor:
        """The pictures, unshifted; plain ones among them."""
        with torch.no_grad():
            pictures = self.canvas.inputs(self._leaves)
            pictures[self._named] = self._pictures()
        return pictures


def _enlarged(images: Tensor, size: int) -> Tensor:
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)

"""The recipe of PSAQ-ViT (Li et al., ECCV 2022).

Noise is turned into pictures by three terms: the entropies of the patch similarities of all
attentions, made large; the cross entropy of a random class; and the distance of the total variation
from a drawn value. There are two phases, the second with wider jitter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lampq.zero_shot.base import Answer, Subject, drawn_view, seeded
from lampq.zero_shot.canvas import Canvas, variation

# the published numbers are for this batch, size and deviation of pixels
BATCH, CHANNELS, SIZE = 32, 3, 224
DEVIATION = (0.229 + 0.224 + 0.225) / 3
JITTER = (15, 30)
TARGETS = (2500.0, 3000.0)


def warm_cosine(step: int, steps: int) -> float:
    """The share of the rate: rising over the first fifth, then half a cosine."""
    warm = max(1, steps // 5)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@dataclass(frozen=True, slots=True)
class PSAQRecipe:
    """PSAQ-ViT's pictures.

    ``rate``: not set, 0.2, and 0.25 where attention works in windows, as published.
    """

    name: ClassVar[str] = "psaq"
    betas: ClassVar[tuple[float, float]] = (0.5, 0.9)
    steps: int = 1000
    rate: float | None = None
    class_weight: float = 1.0
    variation_weight: float = 0.05

    def labels(self, numbers: range, classes: int, seed: int) -> Tensor:
        """Each class is drawn by itself."""
        generator = seeded(seed, "classes", numbers.start)
        return torch.randint(classes, (len(numbers),), generator=generator)

    def begin(
        self, subject: Subject, canvas: Canvas, labels: Tensor, generator: torch.Generator
    ) -> PSAQPainting:
        """Normal noise, and the drawn total variation."""
        rate = self.rate or (0.25 if subject.windows else 0.2)
        return PSAQPainting(self, rate, canvas, labels, generator)


class PSAQPainting:
    """A batch of PSAQ-ViT's pictures."""

    def __init__(
        self,
        recipe: PSAQRecipe,
        rate: float,
        canvas: Canvas,
        labels: Tensor,
        generator: torch.Generator,
    ) -> None:
        self.recipe, self.canvas, self.labels = recipe, canvas, labels
        self._rate, self._generator = rate, generator
        shape = canvas.shape(len(labels))
        self.images = torch.randn(shape, generator=generator).requires_grad_()
        self.parameters = [self.images]
        low, high = TARGETS
        drawn = low + (high - low) * float(torch.rand((), generator=generator))
        # a norm over all pixels of a batch grows with the root of their number: of a larger picture
        # more is wanted, and batches are reduced to 32, which leaves the gradient of one picture
        # in the same proportion to that of the cross entropy
        self.target = drawn * math.sqrt(math.prod(shape[1:]) / (CHANNELS * SIZE**2))
        deviation = sum(canvas.how.std) / len(canvas.how.std)
        self.factor = math.sqrt(BATCH / len(labels)) * deviation / DEVIATION
        self._ends = (canvas.low, canvas.high)

    def _phase(self, step: int) -> tuple[int, int, int]:
        """Which of the two phases a step is in, its number there, and the steps of that phase."""
        first = -(-self.recipe.steps // 2)
        if step < first:
            return 0, step, first
        return 1, step - first, self.recipe.steps - first

    def rate(self, step: int) -> float:
        """Warm-up and half a cosine in each phase."""
        _, number, steps = self._phase(step)
        return self._rate * warm_cosine(number, steps)

    def shown(self, step: int) -> Tensor:
        """All pictures rolled alike and mirrored or not."""
        limit = round(JITTER[self._phase(step)[0]] * self.canvas.how.size / SIZE)
        return drawn_view(self.images, limit, self._generator)

    def loss(self, shown: Tensor, answer: Answer) -> Tensor:
        """Cross entropy and variation, minus the sum of the entropies."""
        named = F.cross_entropy(answer.logits, self.labels)
        rough = (variation(shown) * self.factor - self.target).abs()
        return (
            self.recipe.class_weight * named
            + self.recipe.variation_weight * rough
            - torch.stack(list(answer.entropies)).sum()
        )

    @torch.no_grad()
    def settle(self) -> None:
        """Every pixel within the range of a picture."""
        self.images.clamp_(*self._ends)

    def finished(self) -> Tensor:
        """The pictures, within range."""
        return self.images.detach().clamp(*self._ends)
